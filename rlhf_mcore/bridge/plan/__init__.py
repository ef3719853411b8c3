"""Plan which rectangle goes from one rank to another, and in which bucket. Pure Python."""
