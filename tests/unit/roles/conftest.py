from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.parallel.world import world_of_one


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo world of one for the tests of a module."""
    with world_of_one(tmp_path_factory.mktemp("world")):
        yield
