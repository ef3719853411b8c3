"""The command ``plan``: estimate memory, traffic and time of a run from its configuration."""
