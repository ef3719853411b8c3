"""A pytest plug-in: if a shared fixture fails, one test reports the error, and the other tests that need it are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[object]:
    """Replace the stored exception, which pytest would raise for every dependent test, by a skip that names the first test."""
    try:
        return (yield)
    except Exception:
        if fixturedef.scope != "function" and fixturedef.cached_result is not None:
            first = request._pyfuncitem.nodeid  # request.node is the module or the session for fixtures of wider scope
            skipped = pytest.skip.Exception(f"fixture {fixturedef.argname} failed, see the error of {first}")
            fixturedef.cached_result = (None, fixturedef.cached_result[1], (skipped, None))
        raise
