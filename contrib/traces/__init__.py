"""Traces of episodes for OpenTelemetry."""
