"""Train on preference pairs through commands: best model, kill and resume, adapters, and no reference."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import environment, start_command
from tests.e2e.rollout.tiny import save_model
from tests.e2e.test_adapter_heads import same_files
from tests.e2e.test_adapters import rlhf_mcore
from tests.e2e.test_supervised_chain import CHAIN, write_data
from tests.metric_names import assert_registered

RUN = ["deterministic=true", "checkpoint.save_steps=2", "checkpoint.save_total_limit=9"]
EMITTED = (
    "loss/dpo",
    "preference/accuracy",
    "preference/margin",
    "preference/chosen_reward",
    "evaluate/rejected_reward",
)


def arguments(name: str, *overrides: str) -> list[str]:
    return ["train", "reward.yaml", *RUN, f"experiment={name}", *overrides]


def train(directory: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    rlhf_mcore(directory, *arguments(name, *overrides))
    return [json.loads(line) for line in (directory / "outputs/toy" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("preferences")
    write_data(directory)
    save_model(directory / "model", "qwen3", seed=1)
    (directory / "reward.yaml").write_text(CHAIN.format(model="model", kind="reward", steps=12, lr="1e-3"))
    return directory


def test_a_killed_run_ends_as_one_that_was_left_alone_and_knows_its_best_model(workspace: Path) -> None:
    """The reference is another model that runs once. A reference that runs in every step gives the same results."""
    save_model(workspace / "other", "qwen3", seed=2)
    best = ["algorithm=dpo", "evaluate.every=4", "checkpoint.metric_for_best_model=evaluate/accuracy"]
    compared = [*best, "reference.path=other"]
    best = [*compared, "reference.precompute=true"]
    metrics = train(workspace, "calm", *best)
    calm, killed = (workspace / "outputs/toy" / name for name in ("calm", "killed"))
    assert_registered(calm, *EMITTED, "throughput/<phase>_tokens_per_s")
    held_out = {row["step"]: row["evaluate/accuracy"] for row in metrics if "evaluate/accuracy" in row}
    assert list(held_out) == [0, 4, 8, 12] and held_out[12] > 0.8
    saved = {step: accuracy for step, accuracy in held_out.items() if step}
    assert (calm / "best").resolve().name == f"checkpoint-{max(saved, key=lambda step: saved[step])}"
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", *arguments("killed", *best)]
    with start_command(command, workspace, environment(workspace)) as run:
        run.wait_for(lambda: (killed / "checkpoint-4").exists())
    assert not (killed / "checkpoint-12").exists(), "it was killed before"
    again = train(workspace, "killed", *best)
    names = same_files(calm / "checkpoint-12", killed / "checkpoint-12", "actor")
    assert {"model.safetensors", "config.json"} <= {Path(name).name for name in names}
    for name in ("loss/dpo", "preference/margin", "evaluate/margin"):
        assert again[-1][name] == metrics[-1][name], name
    each = train(workspace, "each", *compared, "trainer.num_steps=4")
    assert metrics[0]["evaluate/margin"] != 0, "the policy does not begin as its reference"
    assert "timing/reference_s" in each[2] and "throughput/reference_tokens_per_s" in each[2]
    assert "timing/reference_s" not in metrics[2] and "timing/reference_s" not in again[-1]
    for name in ("loss/dpo", "actor/grad_norm", "preference/margin", "evaluate/loss"):
        assert metrics[4][name] == pytest.approx(each[4][name], rel=1e-4), name


def test_adapters_are_their_own_reference(workspace: Path) -> None:
    """Two tensor-parallel ranks and a pipeline of two learn the same. The reference is the actor without its adapters."""
    runs = {}
    for layout in ("tp", "pp"):
        once = f"reference.precompute={str(layout == 'pp').lower()}"  # also without the adapters
        runs[layout] = train(workspace, layout, "algorithm=dpo", "actor.lora.rank=4", f"actor.layout.{layout}=2", once)
        assert (workspace / f"outputs/toy/{layout}/latest/actor/adapter_model.safetensors").exists()
    one, other = runs["tp"], runs["pp"]
    assert one[0]["evaluate/loss"] == pytest.approx(math.log(2)) and one[0]["evaluate/margin"] == 0
    assert one[1]["loss/dpo"] == pytest.approx(math.log(2), rel=1e-5)
    assert one[-1]["evaluate/margin"] > 0.05
    for name in ("loss/dpo", "actor/grad_norm", "preference/margin", "evaluate/loss"):
        assert one[-1][name] == pytest.approx(other[-1][name], rel=2e-3), name


def test_without_a_reference_none_is_run(workspace: Path) -> None:
    metrics = train(workspace, "simpo", "algorithm=simpo")
    assert not any(name.startswith(("timing/reference", "throughput/reference")) for row in metrics for name in row)
    assert metrics[-1]["evaluate/accuracy"] > metrics[0]["evaluate/accuracy"]
    assert metrics[-1]["evaluate/loss"] < metrics[0]["evaluate/loss"]


def test_kto_learns_from_its_divergence(workspace: Path) -> None:
    metrics = train(workspace, "kto", "algorithm=kto")
    assert_registered(workspace / "outputs/toy/kto", *EMITTED, "preference/divergence")
    assert metrics[0]["evaluate/accuracy"] == 0.5 and metrics[-1]["evaluate/accuracy"] > 0.8
