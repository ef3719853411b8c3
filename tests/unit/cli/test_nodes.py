"""How many ranks of a machine the bridge is told of."""

from __future__ import annotations

import pytest

from rlhf_mcore.cli import compose


@pytest.mark.parametrize(
    ("world", "local_sizes", "expected"),
    [
        (4, [4, 4, 4, 4], None),  # one machine
        (4, [2, 2, 2, 2], 2),
        (4, [3, 3, 3, 1], None),  # consecutive ranks cannot be told apart by one number
    ],
)
def test_machines_are_told_apart_where_they_are_equal(
    monkeypatch: pytest.MonkeyPatch, world: int, local_sizes: list[int], expected: int | None
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_sizes[0]))
    monkeypatch.setattr(compose.dist, "get_world_size", lambda: world)
    monkeypatch.setattr(compose, "all_gather_json", lambda mine: local_sizes)
    assert compose._ranks_per_node() == expected


def test_without_torchrun_there_is_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(compose.dist, "get_world_size", lambda: 4)
    assert compose._ranks_per_node() is None
