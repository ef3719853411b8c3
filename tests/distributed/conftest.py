from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(4, tmp_path_factory.mktemp("world"))
    yield world
    world.close()
