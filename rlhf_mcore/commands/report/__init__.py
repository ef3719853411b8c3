"""Runs enter, one HTML page leaves. Begin with ``page``."""

SUMMARY = "one HTML file about a run, or about several: health, curves, time, what the model writes"
