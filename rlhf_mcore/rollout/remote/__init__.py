"""Run disaggregated engines in Ray processes. Only this package imports ray for engines, and only inside functions."""
