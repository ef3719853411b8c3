"""What can go wrong with a checkpoint that is not a mistake in the configuration."""

from __future__ import annotations


class SaveError(RuntimeError):
    """A checkpoint could not be written. What was committed before is untouched. The same message on every rank."""
