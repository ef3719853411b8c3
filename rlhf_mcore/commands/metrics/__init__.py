"""The command ``metrics``: explain a metric."""

SUMMARY = "explain a metric: meaning, healthy range, remedy"
