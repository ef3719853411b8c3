"""Worlds, layouts and assumptions that no run has: ``plan`` is as quick to refuse them as to refuse a misspelt key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_mcore.commands.plan import command as plan
from tests.unit.hostile.test_config_json import QWEN_MOE, write

ROOT = Path(__file__).parents[3]


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["--world-size", "1000000000"], "processes=1000000000 is more than the limit of 131072"),
        (["--world-size", "0"], "--world-size 0 is out of range"),
        (["trainer.world_size=1000000000"], "trainer.world_size=1000000000 is out of range"),
        (["actor.layout.tp=1000000000"], "actor.layout.tp=1000000000 is out of range"),
        (
            ["actor.layout.pp=4096", "actor.layout.vpp=1024"],
            "actor.layout.pp*vpp=4194304 is more than num_hidden_layers=24",
        ),
        (
            ["actor.layout.tp=4096", "actor.layout.pp=4096", "actor.layout.ep=4093"],
            "is more than the limit of 131072",
        ),
        (["actor.ranks=[0,2,3,4,5,6,7,8,9]"], "actor.ranks=[0, 2, 3, 4, 5, 6, ...] is not [first, end)"),
        (["rollout.layout.tp=9999999"], "rollout.layout.tp=9999999 is out of range"),
        ([f"actor.layout.layers_per_stage={[1] * 2000}"], "layers_per_stage=[1, 1, 1, 1, 1, 1, ...] has 2000 numbers"),
        (["--set", "reserve_bytes=nan"], "is not of the form NAME=NUMBER"),
        (["actor.optimizer.lr=.nan"], "actor.optimizer.lr=nan is out of range"),
    ]:
        model = ROOT / "configs" / "models" / "Qwen2.5-0.5B-Instruct"
        settings = [str(ROOT / "configs" / "base.yaml"), f"model.path={model}", "data.train=[a.jsonl]"]
        assert plan.main([*settings, *arguments]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.err.startswith("error: ")
        assert len(printed.err) < 10_000
        assert printed.out == ""


def test_plan_of_a_model_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, change in enumerate([{"num_hidden_layers": 10**9}, {"num_experts": 10**7}, {"vocab_size": 3_000_000}]):
        here = tmp_path / str(number)
        here.mkdir()
        folder = write(here / "model", {**QWEN_MOE, **change})
        (key, value), *_ = change.items()
        assert plan.main([str(ROOT / "configs" / "base.yaml"), f"model.path={folder}", "data.train=[a.jsonl]"]) == 2
        assert f"config.json has {key}={json.dumps(value)}, not an integer from 1 to" in capsys.readouterr().err
