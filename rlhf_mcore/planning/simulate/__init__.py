"""Schedules of generation and training, simulated over a distribution of response lengths. No torch, no processes."""
