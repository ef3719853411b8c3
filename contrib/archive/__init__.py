"""Archives of the checkpoints that retention drops (``checkpoint.archive``)."""
