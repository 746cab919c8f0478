"""`python -m shardkit.launch recipe.yaml [key=value ...] [--dry-run]`: check a recipe, then run it."""

from __future__ import annotations

import sys

from shardkit.launch import stopping

if __name__ == "__main__":
    stopping.install(stopping.at_once)  # the imports take longer than a quick Ctrl-C
    from shardkit.launch.command import main

    sys.exit(main())
