"""Checkpoints enter, the names of damaged files leave."""

SUMMARY = "name every damaged file of a checkpoint, or of all checkpoints of a run"
