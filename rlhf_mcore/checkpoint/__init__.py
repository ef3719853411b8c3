"""Checkpoints on disk: how they are named, sealed, committed, pruned and checked. What is in them comes from above."""
