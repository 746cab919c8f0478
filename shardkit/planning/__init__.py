"""`shardkit plan`: what a recipe needs on each backend, before anything is booked or started."""
