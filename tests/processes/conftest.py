"""The working directory for a small valid configuration, as in the unit tests, and Ctrl-C for tests that send it."""

import signal

from tests.unit.conftest import workspace

__all__ = ["workspace"]

# A background job of a shell ignores SIGINT, and its processes inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
