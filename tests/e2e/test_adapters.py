"""Train adapters through commands: save, resume in the same and in other layouts, and merge."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.commands import ROOT, environment, run_command
from tests.e2e.rollout.tiny import save_model
from tests.e2e.test_supervised_chain import CHAIN, write_data
from tests.tiny_training import REWARD, make_quickstart

RUN = [
    "algorithm=sft",
    "deterministic=true",
    "actor.lora.rank=4",
    "checkpoint.save_steps=1",
    "checkpoint.save_total_limit=9",
    "checkpoint.async_save=true",
]

RL = [
    "trainer.num_steps=12",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.engine=vllm",
    "rollout.kv_cache_gib=0.02",
    "rollout.sampling.n=2",
    "rollout.sampling.max_new_tokens=12",
    "reward.function=reward.py:score",
    "evaluate.every=5",
    "checkpoint.save_steps=1",
    "checkpoint.save_total_limit=3",
    "checkpoint.async_save=true",
    "logging.console=plain",
    "logging.trackers=[]",
    "deterministic=true",
]


def rlhf_mcore(directory: Path, *arguments: str) -> str:
    done = run_command(
        [sys.executable, "-m", "rlhf_mcore.cli.main", *arguments], directory, environment(directory), 240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def train(directory: Path, name: str, steps: int, *overrides: str) -> list[dict[str, Any]]:
    rlhf_mcore(directory, "train", "sft.yaml", *RUN, f"experiment={name}", f"trainer.num_steps={steps}", *overrides)
    lines = (directory / "outputs" / "toy" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an uninterrupted run of four steps."""
    directory = tmp_path_factory.mktemp("adapters")
    write_data(directory)
    save_model(directory / "model", "qwen3", seed=1)
    (directory / "sft.yaml").write_text(CHAIN.format(model="model", kind="sft", steps=4, lr="3e-3"))
    train(directory, "calm", 4, "checkpoint.deltas=2")
    return directory / "outputs" / "toy" / "calm"


def test_a_resumed_run_ends_as_one_that_was_left_alone(calm: Path) -> None:
    """Adapters and optimizer state are equal bit for bit. The resumed adapters were saved as a difference from other adapters."""
    workspace, saved = calm.parents[2], "checkpoint-4/actor"
    assert not (calm / "checkpoint-2/actor/adapter_model.safetensors").exists()
    train(workspace, "resumed", 4, f"checkpoint.resume={calm / 'checkpoint-2'}")
    resumed = calm.parent / "resumed"
    files = sorted(path.relative_to(calm / saved) for path in (calm / saved).rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"adapter_config.json", "adapter_model.safetensors", "index.json"}
    assert not any(path.name == "config.json" for path in files), "it is no whole model"
    for path in files:
        assert (resumed / saved / path).read_bytes() == (calm / saved / path).read_bytes(), path
    first, last = (load_file(calm / f"checkpoint-{step}/actor/adapter_model.safetensors") for step in (1, 4))
    assert all(not first[name].equal(last[name]) for name in first), "every matrix has learned"


def test_it_continues_in_another_layout(calm: Path) -> None:
    """The run continues on two tensor-parallel ranks after one rank. A test below resumes magnitudes in a pipeline."""
    workspace, expected = calm.parents[2], json.loads((calm / "metrics.jsonl").read_text().splitlines()[-1])
    moved = train(workspace, "cut", 4, f"checkpoint.resume={calm / 'checkpoint-2'}", "actor.layout.tp=2")[-1]
    for name in ("loss/sft", "actor/grad_norm"):
        assert moved[name] == pytest.approx(expected[name], rel=2e-4), name


def test_magnitudes_are_resumed_in_other_layouts_and_merged(calm: Path) -> None:
    """The run continues in a pipeline of two after two tensor-parallel ranks. The first loss equals the model's."""
    workspace, cut = calm.parents[2], ("actor.lora.use_dora=true", "actor.layout.tp=2")
    metrics = train(workspace, "dora", 3, *cut)
    began = json.loads((calm / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics[0]["evaluate/loss"] == pytest.approx(began["evaluate/loss"], rel=1e-6)
    folder = calm.parent / "dora"
    first, last = (load_file(folder / f"checkpoint-{step}/actor/adapter_model.safetensors") for step in (1, 3))
    assert any("lora_magnitude_vector" in name for name in last)
    assert not any(tensor.equal(first[name]) for name, tensor in last.items()), "every matrix has learned"
    resume = f"checkpoint.resume={folder / 'checkpoint-2'}"
    moved = train(workspace, "dora_moved", 3, "actor.lora.use_dora=true", "actor.layout.pp=2", resume)[-1]
    for name in ("loss/sft", "actor/grad_norm"):
        assert moved[name] == pytest.approx(metrics[-1][name], rel=2e-4), name
    rlhf_mcore(
        workspace, "convert", "--from", "checkpoint", "--to", "hf", str(folder), "dora_merged", "--merge", "--verify"
    )


def test_what_began_with_singular_vectors_is_resumed(calm: Path) -> None:
    """The first loss equals the model's, as with adapters that have no effect. Half of the saved tensors never change."""
    workspace, pissa = calm.parents[2], "actor.lora.init=pissa"
    metrics = train(workspace, "pissa", 2, pissa)
    began = json.loads((calm / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics[0]["evaluate/loss"] == pytest.approx(began["evaluate/loss"], rel=1e-6)
    folder = calm.parent / "pissa"
    train(workspace, "pissa_again", 2, pissa, f"checkpoint.resume={folder / 'checkpoint-1'}")
    first, last, again = (
        load_file(path / "actor/adapter_model.safetensors")
        for path in (folder / "checkpoint-1", folder / "checkpoint-2", calm.parent / "pissa_again/checkpoint-2")
    )
    for name, tensor in last.items():
        assert tensor.equal(again[name]), name
        halves = [x.chunk(2, dim=int("lora_B" in name)) for x in (first[name], tensor)]
        assert not halves[0][0].equal(halves[1][0]) and halves[0][1].equal(halves[1][1]), name


def test_a_merged_model_is_one_of_transformers(calm: Path) -> None:
    workspace = calm.parents[2]
    rlhf_mcore(workspace, "convert", "--from", "checkpoint", "--to", "hf", str(calm), "merged", "--merge", "--verify")
    assert rlhf_mcore(workspace, "verify-checkpoint", str(calm)).count("intact") == 5  # four, and the link
    before, after = (load_file(workspace / name / "model.safetensors") for name in ("model", "merged"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if "proj" in name}


@pytest.mark.parametrize("how", ["actor.lora.use_dora=true", "actor.lora.init=pissa"])
def test_an_engine_draws_with_what_the_actor_computes_with(tmp_path: Path, how: str) -> None:
    """Two tensor-parallel ranks send vLLM merged magnitudes, or A and B with their fixed initial halves. The first KL is zero."""
    make_quickstart(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    changes = ["trainer.num_steps=3", "evaluate.every=0", "checkpoint.save_steps=0", "actor.lora.rank=8", how]
    changes += ["algorithm.kl.coef=0.01", "actor.optimizer.lr=3e-3", "actor.optimizer.weight_decay=0"]
    rlhf_mcore(tmp_path, "train", str(ROOT / "configs/quickstart/grpo.yaml"), *RL, *changes)
    [metrics] = (tmp_path / "outputs").rglob("metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(step["rollout/logprob_diff_max"] for step in steps[-3:]) < 1e-5
    assert steps[-3]["kl/mean"] < 1e-9 and steps[-1]["kl/mean"] > 1e-3


@pytest.mark.timeout(1200)
def test_fault_27_a_killed_run_with_adapters_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    """The run is killed in steps and in saves. vLLM adds the adapters, and receives weights and adapters at every start."""
    make_quickstart(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    config = [str(ROOT / "configs/quickstart/grpo.yaml"), "actor.lora.rank=8", "actor.lora.sync=adapter"]
    chaos = [sys.executable, str(ROOT / "tools" / "chaos.py"), *config, "algorithm.kl.coef=0.01", *RL]
    arguments = ["--kills", "2", "--after-save", "half", "--latest", "2"]
    done = run_command([*chaos, *arguments], tmp_path, environment(tmp_path), 1100)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 kills, 0 differences" in done.stdout
