"""The working directory in which a small configuration is valid, as in the unit tests."""

from tests.unit.conftest import workspace

__all__ = ["workspace"]
