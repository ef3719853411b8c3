"""The command ``verify-checkpoint``: find damaged files in checkpoints."""

SUMMARY = "name every damaged file of a checkpoint, or of all checkpoints of a run"
