"""Benchmarks of the simulator. `benchmarks/run.py` runs them with all others."""
