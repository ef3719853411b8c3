"""Pass a configuration from a starter to its ranks without changes: every type of key, and secrets in their written form."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rlhf_mcore.cli.arguments import offer, receive
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.config.settings import to_yaml
from tests.commands import ROOT

SETTINGS = [
    "algorithm=dr_grpo",
    "reward.rules=[math, {name: format, weight: 0.25}]",
    "reward.sources={gsm8k: [{name: final_number, weight: 2}], other: [exact_match]}",
    "actor.megatron={bucket_size: 7, nested: {list: [1, 2.5, x]}}",
    "data.eval=[a.jsonl, '${oc.env:PLACE}/b.jsonl']",
    "experiment=${oc.env:SECRET}",
    "environment.options={levels: {1: 0.5}, odd: '1.10'}",
    "actor.ranks=[0, 2]",
    "logging.trackers=[tensorboard]",
]

RANK = """
import sys
from rlhf_mcore.cli.arguments import receive
print(receive(sys.argv[1]).trainer.num_steps)
"""


def test_a_document_is_the_configuration(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret-value")
    monkeypatch.setenv("PLACE", "/scratch/place")
    cfg = resolve(load_config("run.yaml", SETTINGS))
    with offer(cfg) as path:
        copy = receive(path)
    assert copy == cfg
    assert to_dict(copy) == to_dict(cfg)
    assert type(copy.reward.sources["gsm8k"][0]) is type(cfg.reward.rules[0])
    assert (copy.experiment, copy.data.eval[1]) == ("s3cret-value", "/scratch/place/b.jsonl")
    assert copy.environment.options == {"levels": {1: 0.5}, "odd": "1.10"}
    assert to_yaml(copy) == to_yaml(cfg)
    assert "s3cret-value" not in to_yaml(copy)


def test_a_child_reads_it(workspace: Any) -> None:
    cfg = resolve(load_config("run.yaml", ["trainer.num_steps=17"]))
    with offer(cfg) as path:
        done = subprocess.run(
            [sys.executable, "-c", RANK, path],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == "17\n"


def test_nothing_is_left_when_the_starter_has_gone(workspace: Any) -> None:
    with offer(load_config("run.yaml")) as path:
        pass
    with pytest.raises(FileNotFoundError):
        receive(path)
