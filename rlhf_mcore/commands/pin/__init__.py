"""A checkpoint of a run enters and is kept under a name."""

SUMMARY = "keep a checkpoint of a run under a name"
