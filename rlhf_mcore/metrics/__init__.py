"""The metrics of a run: their meanings and their healthy ranges."""
