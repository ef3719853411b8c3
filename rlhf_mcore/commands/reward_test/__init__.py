"""Data and a reward enter; what the reward says of right and wrong answers leaves."""

SUMMARY = "try the reward on the data: ground truths must be right, other answers must not"
