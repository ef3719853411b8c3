"""Compute what a configuration needs without a GPU, without weights and without torch: memory, traffic and time."""
