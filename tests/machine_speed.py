"""Measure how slow this machine is, and scale the time limits of tests by it.

``python -m tests.machine_speed`` computes for two seconds and prints the factor, 1.0 or more, that ``launch/test.sh`` puts into
``RLHF_MCORE_TEST_SLOWNESS``. A busy machine counts as slow, because limits are wall time.
"""

from __future__ import annotations

import os
import time
import zlib

VARIABLE = "RLHF_MCORE_TEST_SLOWNESS"
REFERENCE_ROUNDS_PER_S = 100.0  # measured on an idle core of an AMD EPYC 9005 (Zen 5), on which the limits were chosen
SECONDS = 2.0
MOST = 12.0  # an even slower machine has another problem


def scale_seconds(seconds: float) -> float:
    """Return a time limit in seconds for this machine."""
    return seconds * float(os.environ.get(VARIABLE, "1"))


def measure(seconds: float = SECONDS) -> float:
    """Return the slowness of this machine: the reference's rounds per second divided by its own, between 1 and ``MOST``."""
    data, rounds, start = bytes(range(256)) * 64, 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        table = {str(number): number * number % 7919 for number in range(20_000)}
        total = sum(table.values())
        zlib.compress(data + str(total).encode(), 6)
        rounds += 1
    return min(MOST, max(1.0, REFERENCE_ROUNDS_PER_S * elapsed / rounds))


if __name__ == "__main__":
    print(f"{measure():.2f}")
