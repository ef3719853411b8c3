"""Which rectangle goes from which rank to which rank, in which bucket. Pure Python."""
