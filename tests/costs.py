"""A pytest plug-in: write the CPU seconds and the tier of every test into the JUnit file, for ``tools/test_costs.py``.

The CPU seconds include all processes that the test started, even if they still run. A shared fixture counts for the first test that
uses it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import descendants
from tests.tiers import tier_of

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_before: list[float] = [0.0]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, of its ended children and of its running descendants."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for pid in descendants(os.getpid()):
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / _TICKS_PER_S  # utime, stime, cutime, cstime of proc(5)
    return total


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start to count before fixtures are built."""
    _before[0] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[object]:
    """Add both properties after the test, because JUnit files read them from the last report."""
    if call.when == "teardown":
        item.user_properties.append(("cpu_s", f"{max(0.0, cpu_seconds() - _before[0]):.2f}"))
        item.user_properties.append(("tier", tier_of(item)))
    return (yield)
