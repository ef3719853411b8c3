"""Score finished trajectories with rule graders or the user's reward functions."""
