"""Run engines in processes of their own, under Ray. No other package imports ray for them, and this one does it late."""
