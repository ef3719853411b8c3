"""Runs untrusted programs, such as model output, in confined processes without access to the machine."""
