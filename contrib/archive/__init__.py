"""Archives of the checkpoints that retention drops."""
