"""Configurations enter; their resolved form, difference or explanation leaves."""

SUMMARY = "show a configuration with all that follows from it, compare two, explain a key"
