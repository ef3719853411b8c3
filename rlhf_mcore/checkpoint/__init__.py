"""Name, seal, commit, prune and check checkpoints on disk. Higher layers provide their contents."""
