"""Episodes of several turns in real trainings: with an engine of two ranks, with engines of their own, and stopped and resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, finished

TRAIN = [sys.executable, "-m", "rlhf_mcore.cli.train"]
SMALL = [
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=4",
    "rollout.sampling.n=4",
    "evaluate.max_prompts=4",
    "logging.tensorboard=false",
    "logging.rollouts_every=1",
    "logging.console=plain",
    "deterministic=true",
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models, fitted for a few steps."""
    folder = tmp_path_factory.mktemp("environments")
    (folder / "examples").symlink_to(ROOT / "examples")
    for kind, steps in (("guess", "40"), ("calculator", "40")):
        tool = [sys.executable, str(ROOT / "tools" / "make_environments.py"), kind, "--out", kind]
        made = finished([*tool, "--fit-steps", steps], folder)
        assert made.returncode == 0, made.stderr
    return folder


def train(folder: Path, config: str, name: str, *settings: str) -> Path:
    """The directory of a run that has ended well."""
    command = [*TRAIN, str(ROOT / "configs" / "quickstart" / f"{config}.yaml"), *SMALL, f"experiment={name}", *settings]
    done = finished(command, folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "outputs" / "quickstart" / name


def rollouts(run: Path) -> list[dict[str, Any]]:
    """Of all steps."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_with_an_engine_of_its_own_stopped_and_resumed_it_is_the_synchronous_run_bit_for_bit(workspace: Path) -> None:
    whole = train(workspace, "guess", "whole", "rollout.engine=hf", "trainer.num_steps=3")
    first = ["rollout.engine=hf", "rollout.placement=disaggregated", "actor.optimizer.schedule.total_updates=3"]
    stopped = train(workspace, "guess", "stopped", *first, "trainer.num_steps=2")
    assert train(workspace, "guess", "stopped", *first, "trainer.num_steps=3") == stopped
    assert rollouts(stopped) == rollouts(whole)
    weights = Path("latest") / "actor" / "model.safetensors"
    assert (stopped / weights).read_bytes() == (whole / weights).read_bytes()
    for record in rollouts(whole):
        turns = record["turns"]
        assert [turn["writer"] for turn in turns] == ["policy", "environment"] * (len(turns) // 2) + ["policy"]
        assert record["finish_reason"] == ("stop" if record["score"] == 1.0 else "turns")
        assert len(turns) == 5 or record["score"] == 1.0


def test_an_engine_of_two_ranks_takes_turns_with_a_tool(workspace: Path) -> None:
    ranks = ["trainer.world_size=2", "rollout.layout.tp=2", "actor.layout.tp=2"]
    run = train(workspace, "calculator", "two", *ranks, "trainer.num_steps=2", "bridge.canary=true")
    found = rollouts(run)
    assert len(found) == 2 * 16
    called = [record for record in found if "environment" in [turn["writer"] for turn in record["turns"]]]
    for record in called:
        said, answer = (turn["text"] for turn in record["turns"][:2])
        if record["prompt"][8:].startswith(said.removeprefix("<tool>calculator ").removesuffix("</tool>")):
            assert answer == str(eval(answer)) and record["finish_reason"] in ("stop", "turns", "length")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(abs(line["rollout/logprob_diff_max"]) < 1e-3 for line in lines if "rollout/logprob_diff_max" in line)
