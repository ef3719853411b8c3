"""A training run on several machines over ssh."""

SUMMARY = "train on several machines over ssh, without SLURM"
