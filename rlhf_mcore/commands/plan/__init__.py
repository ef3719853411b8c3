"""A configuration enters; memory, traffic and time of its run leave."""

SUMMARY = "memory, traffic and time of a run, before a GPU is asked for"
