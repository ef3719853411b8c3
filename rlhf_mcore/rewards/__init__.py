"""Scoring of finished trajectories: rule graders over strings, and functions of the user's."""
