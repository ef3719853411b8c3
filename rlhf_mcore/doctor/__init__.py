"""Checks of a machine and its software before a run. Nothing here but ``network`` imports torch."""
