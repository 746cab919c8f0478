"""`shardkit explain`: what a recipe comes to on each backend, side by side, before anything runs."""
