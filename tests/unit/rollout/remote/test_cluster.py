"""Detecting a lost Ray head by checks that may fail once."""

from __future__ import annotations

import socket

import pytest

from rlhf_mcore.rollout.remote import cluster
from rlhf_mcore.rollout.remote.cluster import Cluster


def test_the_head_is_lost_after_looks_that_fail_for_a_while_and_not_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(cluster.time, "monotonic", lambda: clock[0])
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        joined = Cluster(None, 1, joined=f"127.0.0.1:{port}")
        assert joined.problem() is None
    clock[0] += 60  # the last check was a minute ago
    assert joined.problem() is None
    clock[0] += 3
    assert joined.problem() is None
    with socket.create_server(("127.0.0.1", port)):
        clock[0] += 3
        assert joined.problem() is None, "it answers again"
    for _ in range(3):
        clock[0] += 3
        assert joined.problem() is None
    clock[0] += 3
    assert joined.problem() == f"Ray's head at 127.0.0.1:{port} does not answer"


@pytest.mark.parametrize(
    ("engines", "size", "gpus", "nodes", "expected"),
    [
        (2, 2, 0, [{"CPU": 8.0}], None),
        (3, 2, 0, [{"CPU": 4.0}, {"CPU": 4.0}], "engines of 2 ranks (rollout.layout) need 12 CPUs, and Ray has 8"),
        (
            2,
            2,
            0,
            [{"CPU": 5.0}, {"CPU": 3.0}],
            "need 2 CPUs for each rank, and Ray's machines have room for 3 ranks",
        ),
        (
            3,
            2,
            1,
            [{"CPU": 4.0, "GPU": 4.0}, {"CPU": 16.0, "GPU": 2.0}],
            "need 2 CPUs and 1 GPU for each rank, and Ray's machines have room for 4 ranks",
        ),
        (1, 2, 1, [{"CPU": 16.0}], "engines of 2 ranks (rollout.layout) need 2 GPUs, and Ray has 0"),
        (4, 2, 1, [{"CPU": 9.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 8.0}], None),
    ],
)
def test_ranks_of_engines_need_room_on_machines(
    monkeypatch: pytest.MonkeyPatch,
    engines: int,
    size: int,
    gpus: int,
    nodes: list[dict[str, float]],
    expected: str | None,
) -> None:
    """Each rank has two cores; a machine that is lost has none."""
    ray = pytest.importorskip("ray")
    found = [{"Resources": node, "Alive": True} for node in nodes] + [{"Resources": {"CPU": 99.0}, "Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    problem = Cluster(None, 2, gpus=gpus).capacity_problem(engines, size)
    if expected is None:
        assert problem is None
    else:
        assert problem is not None and problem.startswith(f"rollout.num_engines={engines}: ") and expected in problem


@pytest.mark.parametrize(
    ("engines", "size", "nodes", "expected"),
    [
        (1, 8, [8, 8], 8),  # on one
        (1, 16, [8, 8], 8),
        (2, 8, [8, 4, 4], 4),  # the second has no machine of its own
        (1, 12, [8, 8], 6),
        (1, 3, [2, 2], 1),
        (1, 16, [8, 6], 0),
    ],
)
def test_an_engine_spans_as_few_machines_as_can_be_with_equally_many_ranks_on_each(
    engines: int, size: int, nodes: list[int], expected: int
) -> None:
    found = [{"CPU": 99.0, "GPU": float(gpus)} for gpus in nodes]
    assert cluster._ranks_per_machine(engines, size, {"CPU": 2, "GPU": 1}, found) == expected
