"""Rollouts as coroutines: the passes of an engine, its follower ranks, and the steps from prompt to trajectory."""
