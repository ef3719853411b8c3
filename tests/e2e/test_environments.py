"""Episodes of several turns in real trainings: with an engine of two ranks, with engines of their own, and stopped and resumed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, finished, started
from tests.metric_names import assert_registered

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


def command(config: str, name: str, *settings: str) -> list[str]:
    """A small training."""
    return [*TRAIN, str(ROOT / "configs" / "quickstart" / f"{config}.yaml"), *SMALL, f"experiment={name}", *settings]


def train(folder: Path, config: str, name: str, *settings: str) -> Path:
    """The directory of a run that has ended well."""
    done = finished(command(config, name, *settings), folder)
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


SLOW = """
import asyncio, os

class Slow:
    async def reset(self, row, seed):
        self.broken, self.turns = row["prompt_id"].endswith("7"), 0
        with open("resets", "a") as file:
            file.write(f"{row['prompt_id']} {seed} {os.getppid()}\\n")

    async def step(self, action):
        await asyncio.sleep(0.1)
        self.turns += 1
        if self.broken:
            raise ValueError("it is broken")
        return "higher", len(action), self.turns == 3
"""


def test_fault_18_an_engine_is_killed_in_the_middle_of_episodes_and_others_play_them_again(workspace: Path) -> None:
    (workspace / "slow.py").write_text(SLOW)
    settings = ["environment.function=slow.py:Slow", "rollout.engine=hf", "rollout.placement=disaggregated"]
    settings += ["rollout.num_engines=2", "trainer.max_staleness=2", "trainer.num_steps=5", "evaluate.every=0"]
    settings += ["rollout.engine_timeout_s=20", "reward.on_error=zero", "reward.max_error_share=1"]
    resets, run = workspace / "resets", workspace / "outputs" / "quickstart" / "killed"
    with started(command("guess", "killed", *settings), workspace, dict(os.environ)) as running:
        running.wait_for(lambda: len(list((run / "rollouts").glob("*.jsonl"))) >= 2)
        victim = resets.read_text().splitlines()[-1].split()[-1]  # the process that has just begun an episode
        os.kill(int(victim), signal.SIGKILL)
        printed = running.end()
    assert running.process.returncode == 0 and "Traceback" not in printed, printed
    assert "has failed and is started again" in printed
    begun = [tuple(line.split()) for line in resets.read_text().splitlines()]
    lost = {line[:2] for line in begun if line[2] == victim}
    assert lost & {line[:2] for line in begun if line[2] != victim}  # with the same seeds
    found = rollouts(run)
    learned = Counter(record["prompt_id"] for record in found)
    assert len(learned) == 20 and set(learned.values()) == {4}
    for record in found:
        assert record["prompt_id"].endswith("7") == (record["failure"] == "error")
        assert len([turn for turn in record["turns"] if turn["writer"] == "policy"]) in (1, 3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert 0 < max(line.get("rollout/staleness_max", 0) for line in lines) <= 2


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
    assert_registered(run, "timing/prefix_hit")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert called and max(line.get("timing/prefix_hit", 0) for line in lines) > 0  # of the turns after a call
    assert all(abs(line["rollout/logprob_diff_max"]) < 1e-3 for line in lines if "rollout/logprob_diff_max" in line)
