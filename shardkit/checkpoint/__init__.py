"""Portable checkpoints: saved on any backend and number of processes, resumed on any other."""
