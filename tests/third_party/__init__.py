"""A package of someone else: engines that shardkit does not know."""
