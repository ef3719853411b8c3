"""Train adapters of a reward model and of a critic: save them with their heads, resume, merge, and use them in PPO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import beside
from tests.e2e.rollout.tiny import save_model
from tests.e2e.test_adapters import rlhf_mcore
from tests.e2e.test_supervised_chain import CHAIN, write_data

RUN = ["deterministic=true", "checkpoint.save_steps=2", "checkpoint.save_total_limit=9", "actor.lora.rank=4"]
REWARD = ["algorithm=reward_model"]
PPO = [
    "algorithm=ppo",
    "critic.lora.rank=4",
    "critic.lora.targets=[q_proj,down_proj]",
    "critic.optimizer.lr=1e-3",
    "reward.rules=[]",
    "reward.model.path=merged",
    "rollout.engine=hf",
    "rollout.sampling={n: 2, max_new_tokens: 8}",
]


def train(directory: Path, kind: str, name: str, *overrides: str) -> Path:
    rlhf_mcore(directory, "train", f"{kind}.yaml", *RUN, f"experiment={name}", *overrides)
    return directory / "outputs" / "toy" / name


def same_files(one: Path, other: Path, *models: str) -> list[str]:
    """Return the names of the model files, and check that they are equal in both checkpoints."""
    names = [str(path.relative_to(one)) for model in models for path in (one / model).rglob("*") if path.is_file()]
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    return names


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a reward model for four steps, and merge its adapters into a second directory. Returns the run directory."""
    directory = tmp_path_factory.mktemp("heads")
    write_data(directory)
    save_model(directory / "model", "qwen3", seed=1)
    for kind in ("reward", "ppo"):
        (directory / f"{kind}.yaml").write_text(CHAIN.format(model="model", kind=kind, steps=4, lr="3e-3"))
    run = train(directory, "reward", "reward", *REWARD)
    rlhf_mcore(
        directory,
        "convert",
        "--from",
        "checkpoint",
        "--to",
        "hf",
        "--role",
        "reward",
        str(run),
        "merged",
        "--merge",
        "--verify",
    )
    return run


@pytest.fixture(scope="module")
def ppo(reward: Path) -> Path:
    return train(reward.parents[2], "ppo", "ppo", *PPO)


def test_a_reward_model_is_saved_with_its_head(reward: Path) -> None:
    content = json.loads((reward / "checkpoint-4/reward/adapter_config.json").read_text())
    assert (content["task_type"], content["modules_to_save"]) == ("SEQ_CLS", ["score"])
    first, last = (load_file(reward / f"checkpoint-{step}/reward/adapter_model.safetensors") for step in (2, 4))
    assert "base_model.model.score.weight" in last
    assert all(not first[name].equal(last[name]) for name in first), "every matrix has learned, the head too"
    lines = [json.loads(line) for line in (reward / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss/reward_model"] < lines[1]["loss/reward_model"]


def test_a_reward_model_continues_in_a_pipeline(reward: Path) -> None:
    expected = json.loads((reward / "metrics.jsonl").read_text().splitlines()[-1])
    resumed = f"checkpoint.resume={reward / 'checkpoint-2'}"
    run = train(reward.parents[2], "reward", "pp2", *REWARD, resumed, "actor.layout.pp=2")
    moved = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for name in ("loss/reward_model", "reward_model/grad_norm"):
        assert moved[name] == pytest.approx(expected[name], rel=2e-4), name


@beside.needs("peft", "accelerate")
def test_what_is_merged_is_what_peft_merges(reward: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    workspace = reward.parents[2]
    base: Any = AutoModelForSequenceClassification.from_pretrained(
        workspace / "model", num_labels=1, dtype=torch.float32
    )
    merged = (
        beside.peft()
        .PeftModel.from_pretrained(base, str(reward / "checkpoint-4/reward"))
        .merge_and_unload()
        .state_dict()
    )
    ours = load_file(workspace / "merged" / "model.safetensors")
    assert ours.keys() == merged.keys() and all(torch.equal(ours[name], merged[name]) for name in ours)
    assert json.loads((workspace / "merged/config.json").read_text())["architectures"] == [
        "Qwen3ForSequenceClassification"
    ]


def test_ppo_learns_with_adapters_of_actor_and_critic(ppo: Path) -> None:
    content = json.loads((ppo / "checkpoint-4/critic/adapter_config.json").read_text())
    assert (content["task_type"], content["modules_to_save"]) == ("TOKEN_CLS", ["score"])
    assert content["target_modules"] == ["down_proj", "q_proj"]
    first, last = (load_file(ppo / f"checkpoint-{step}/critic/adapter_model.safetensors") for step in (2, 4))
    assert {"base_model.model.score.weight", "base_model.model.score.bias"} < last.keys()
    assert all(not first[name].equal(last[name]) for name in first)


def test_a_critic_is_merged_with_its_head(ppo: Path) -> None:
    workspace = ppo.parents[2]
    rlhf_mcore(
        workspace,
        "convert",
        "--from",
        "checkpoint",
        "--to",
        "hf",
        "--role",
        "critic",
        str(ppo),
        "value",
        "--merge",
        "--verify",
    )
    merged, adapters = (
        load_file(file)
        for file in (workspace / "value/model.safetensors", ppo / "checkpoint-4/critic/adapter_model.safetensors")
    )
    assert all(merged[name].equal(adapters[f"base_model.model.{name}"]) for name in ("score.weight", "score.bias"))
    assert json.loads((workspace / "value/config.json").read_text())["architectures"] == ["Qwen3ForTokenClassification"]


def test_a_resumed_ppo_run_ends_as_one_that_was_left_alone(ppo: Path) -> None:
    again = train(ppo.parents[2], "ppo", "ppo_again", *PPO, f"checkpoint.resume={ppo / 'checkpoint-2'}")
    names = same_files(ppo / "checkpoint-4", again / "checkpoint-4", "actor", "critic")
    assert {"actor/adapter_model.safetensors", "critic/adapter_model.safetensors"} < set(names)


def test_actor_and_critic_have_layouts_of_their_own(ppo: Path) -> None:
    """The actor runs in a pipeline and the critic is tensor-parallel. The values equal those on one rank."""
    expected = json.loads((ppo / "metrics.jsonl").read_text().splitlines()[3])
    cut = [
        "actor.layout.pp=2",
        "critic.layout.tp=2",
        f"checkpoint.resume={ppo / 'checkpoint-2'}",
        "trainer.num_steps=3",
    ]
    run = train(ppo.parents[2], "ppo", "ppo_cut", *PPO, *cut)
    moved = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert moved["step"] == expected["step"] == 3
    for name in ("loss/value", "critic/grad_norm"):
        assert moved[name] == pytest.approx(expected[name], rel=2e-3), name
