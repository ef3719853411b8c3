"""Runs untrusted programs, such as a model's, in processes of their own without access to anything."""
