"""An engine whose ranks are on two nodes of a Ray cluster. Both nodes are on this machine here, with room for one rank each."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlhf_mcore.rollout.remote.cluster import Cluster
from tests.commands import environment, start_command
from tests.e2e.remote.fleets import begin, collect, jobs, plan, publish, running, tokens
from tests.e2e.rollout.tiny import save_model

NODE = [sys.executable, "-m", "rlhf_mcore.rollout.remote.node", "--address=127.0.0.1"]


def test_an_engine_spans_two_nodes_and_draws_what_one_rank_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "qwen3", 1)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    own = {
        **environment(tmp_path),
        "RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    drawn = {}
    with ExitStack() as stack:
        head = stack.enter_context(start_command([*NODE, "--head"], tmp_path, own))
        head.wait_for(lambda: "\nray " in f"\n{head.output()}", 120)
        address = head.output().partition("ray ")[2].split()[0]
        for _ in range(2):
            stack.enter_context(
                start_command([*NODE, f"--port={address.rpartition(':')[2]}", "--cpus=1"], tmp_path, own)
            )
        for tp in (2, 1):
            with running(plan(tmp_path, "vllm", tp=tp), Cluster(address, 1)) as (fleet, notes):
                members = publish(fleet, 0, tmp_path, name=f"tp{tp}")
                drawn[tp] = tokens(collect(fleet, begin(fleet, asked := jobs(3, 2)), tmp_path))
            assert len(members) == tp and len(drawn[tp]) == len(asked)
            assert any(note.endswith(" and 1 more machine") for note in notes) == (tp == 2), notes
    assert drawn[2] == drawn[1]
    ranks = [json.loads((tmp_path.parent / f"tp2.{rank}.environment").read_text()) for rank in (1, 2)]
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["LOCAL_WORLD_SIZE"]) for rank in ranks] == [
        ("0", "0", "1"),
        ("1", "0", "1"),
    ]
