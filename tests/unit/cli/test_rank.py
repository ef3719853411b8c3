"""How a rank begins: in a world of one, without the claim of a device."""

from __future__ import annotations

import resource
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from rlhf_mcore.cli import rank
from rlhf_mcore.config.schema import Config
from rlhf_mcore.parallel import joint_group
from rlhf_mcore.platform import Platform


def test_all_ranks_connect_before_anything_of_the_run_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """So NCCL's first operation is one of every rank, and its memory is taken when an engine looks how much is free."""
    summed: list[list[float]] = []
    bound: list[str] = []

    def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
        assert group is None
        summed.append(tensor.tolist())

    class Device(Platform):
        collective_backend = "gloo"

        def device(self) -> torch.device:
            return torch.device("cpu")

        def setup_process(self, local_rank: int, threads: int, deterministic: bool = False) -> None: ...

        def bind_to_node(self) -> None:
            bound.append("node")

    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("rlhf_mcore.platform.current_platform", Device)
    monkeypatch.setattr(rank.gc, "freeze", lambda: None)
    monkeypatch.setattr(joint_group, "current_platform", Device)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with rank.join_world(Config(), timedelta(seconds=60)):
        assert summed == [[1.0]] and bound == ["node"]
    cfg = Config()
    cfg.trainer.bind_numa = "off"
    with rank.join_world(cfg, timedelta(seconds=60)):
        assert bound == ["node"]


def test_a_rank_may_open_as_many_files_as_the_hard_limit_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit of 1,024 is too low for the sockets of 512 ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(rank, "end_with_parent", MagicMock())
    monkeypatch.setattr(rank.signal, "signal", MagicMock())
    monkeypatch.setattr(rank.faulthandler, "register", MagicMock())
    monkeypatch.setattr(rank, "torchrun_world_size", lambda: 1)
    monkeypatch.setattr(rank, "_flush", lambda code: None)
    found: list[tuple[int, int]] = []

    def main() -> int:
        found.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        return 0

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
        assert rank.run(main) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [(hard, hard)]
