"""Whether Ray's head is there, by looks that may fail once."""

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
    clock[0] += 60  # nobody has looked for a minute
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
