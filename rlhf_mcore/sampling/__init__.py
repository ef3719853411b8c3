"""Rollouts as coroutines: an engine's passes, its followers, and how a prompt becomes a trajectory."""
