"""Run trainings from the command line with further settings: truncated sampling, other layouts, a profile, an alarm."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, run_command
from tests.metric_names import assert_registered
from tests.tiny_training import make_quickstart

STEPS = 2
# Noise of logprobs between layouts and batch shapes, and therefore of means over tokens: NOISE of tests/distributed/setting.py.
LOGPROB_NOISE = 1e-5
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 17) / 16
"""
RUNS = {
    # Tensor-parallel actor, vLLM, the planned bridge with every tensor hashed, and a reference in the loss.
    # The reward differs between responses, so each step has a gradient. Both runs sample from a part of the vocabulary.
    "vllm": [
        "rollout.sampling.temperature=0.7",
        "rollout.sampling.top_p=0.9",
        "bridge.verify=digest",
        "algorithm.kl.coef=0.01",
        "checkpoint.save_steps=1",
        "reward.function=reward.py:score",
    ],
    # A pipeline, the transformers engine, the plain bridge, KL in the reward, Dr. GRPO, padded microbatches.
    "hf": [
        "actor.layout.tp=1",
        "actor.layout.pp=2",
        "rollout.engine=hf",
        "rollout.sampling.top_k=5",
        "bridge.method=gather",
        "algorithm=dr_grpo",
        "algorithm.kl.coef=0.01",
        "algorithm.kl.placement=reward",
        "trainer.packing=false",
        "trainer.profile.steps=[2]",
        "alarms.rules=[{metric: rollout/num_tokens, above: 0, steps: 2, actions: [command]}]",
        "alarms.command=[tee, alarm.json]",
    ],
}


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, *arguments], directory, {**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train")
    make_quickstart(directory, num_eval=12)
    (directory / "reward.py").write_text(REWARD)
    return directory


@pytest.fixture(scope="module")
def vllm(workspace: Path) -> Path:
    """Return the directory of the run ``vllm``."""
    return train(workspace, "vllm", RUNS["vllm"])[0]


@pytest.fixture(scope="module")
def hf(workspace: Path) -> tuple[Path, str]:
    """Return the directory of the run ``hf`` and its output."""
    return train(workspace, "hf", RUNS["hf"])


def train(workspace: Path, name: str, overrides: list[str]) -> tuple[Path, str]:
    """Run a training. Returns its directory and its output."""
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    small = [
        f"trainer.num_steps={STEPS}",
        "trainer.prompts_per_step=4",
        "trainer.minibatch_size=2",
        "rollout.sampling.n=4",
    ]
    done = run(workspace, "-m", "rlhf_mcore.cli.main", "train", config, f"experiment={name}", *small, *overrides)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return workspace / "outputs" / "quickstart" / name, done.stdout


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_of_vllm_with_kl_in_the_loss(vllm: Path) -> None:
    check_metrics(vllm, "loss/kl")
    assert not (vllm / "profile").exists()


def test_metrics_of_transformers_with_kl_in_the_reward(hf: tuple[Path, str]) -> None:
    check_metrics(hf[0])


def check_metrics(directory: Path, *more: str) -> None:
    of_support = ["rollout/support_size", "rollout/support_mass"]
    others = ["bridge/local_bytes", "timing/<phase>_s", "reward/timeouts"]
    assert_registered(directory, "kl/coef", *more, *of_support, *others)
    metrics = lines(directory / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics[1:]:
        assert row["rollout/logprob_diff_max"] < 1e-4
        assert 0 <= row["rollout/logprob_diff_mean"] <= row["rollout/logprob_diff_max"]
        assert row["rollout/ratio_mean"] == pytest.approx(1, abs=LOGPROB_NOISE)
        assert 0 < row["rollout/support_mass"] < 0.9999 and row["rollout/support_size"] >= 1
        assert 0 <= row["reward/mean"] <= 1
        assert row["actor/grad_norm"] >= 0 and row["actor/skipped_updates"] == 0
        assert row["timing/update_s"] > 0 and row["timing/sync_s"] > 0
    assert {"evaluate/accuracy", "evaluate/reward"} <= metrics[0].keys() & metrics[-1].keys()
    # In the first step the policy equals its reference, so k3 is half the square of the noise.
    assert metrics[1]["kl/mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["kl/coef"] == 0.01 and math.isfinite(metrics[2]["kl/mean"])


def test_an_alarm_is_printed_once_and_given_to_a_command(hf: tuple[Path, str], workspace: Path) -> None:
    directory, output = hf
    printed = [line for line in output.splitlines() if "alarm: rollout/num_tokens" in line]
    alarm = json.loads((workspace / "alarm.json").read_text())
    sampled = lines(directory / "metrics.jsonl")[2]["rollout/num_tokens"]
    assert (alarm["step"], alarm["value"], alarm["run"]) == (2, sampled, "quickstart/hf") and printed == [alarm["text"]]


def test_context_parallel_ranks_with_a_shared_queue_continue_with_the_same_numbers(vllm: Path, workspace: Path) -> None:
    """Engines that take the next group from a queue sample the same tokens as engines with fixed shares."""
    shared = ["actor.layout.tp=1", "actor.layout.cp=2", f"checkpoint.resume={vllm / 'checkpoint-1'}"]
    order = ["rollout.order=shared_queue", "rollout.max_num_seqs=4"]  # slots for one of four prompts
    shared_directory, _ = train(workspace, "shared", [*RUNS["vllm"], *shared, *order])
    drawn, usual = (lines(run / "rollouts" / "step-000002.jsonl") for run in (shared_directory, vllm))
    assert len(drawn) == 16 and [row["response"] for row in drawn] == [row["response"] for row in usual]
    (found,) = (row for row in lines(shared_directory / "metrics.jsonl") if row["step"] == 2)
    expected = lines(vllm / "metrics.jsonl")[2]
    assert expected["actor/grad_norm"] > 0 and found["rollout/logprob_diff_max"] < 1e-4
    for metric in ("reward/mean", "loss/total", "loss/policy", "loss/kl", "actor/grad_norm"):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-4, abs=LOGPROB_NOISE), metric


def test_a_profile_has_both_ranks_their_phases_and_what_torch_ran(hf: tuple[Path, str]) -> None:
    directory, output = hf
    (file,) = (directory / "profile").iterdir()
    assert file.name == "steps-2-2.json.gz" and str(file) in output
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0 (actor, engine)", "rank 1 (actor, engine)"]
    begun: dict[str, list[float]] = {}
    for rank in names:
        seen = {event["name"]: event["ts"] for event in events if event["pid"] == rank and event["ph"] == "X"}
        assert {"generate", "update", "sync", "aten::mm"} <= seen.keys()
        assert seen["generate"] < seen["update"] < seen["sync"]
        begun.setdefault("update", []).append(seen["update"])
    assert abs(begun["update"][0] - begun["update"][1]) < 60e6, "one clock"
