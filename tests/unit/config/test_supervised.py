"""Test configurations of supervised runs: required, ignored and rejected settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.questions import needs_critic, needs_reference, role_layouts
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
SINGLE = {"prompt": "1+1=", "response": "2"}
ROWS = {"sft": SINGLE, "reward_model": PAIR, "dpo": PAIR}


def load(kind: str, *overrides: str) -> Config:
    return load_config("run.yaml", [f"algorithm={kind}", *overrides])


def check(kind: str, *overrides: str, world_size: int | None = None) -> list[str]:
    try:
        validate(load(kind, *overrides), world_size)
    except ConfigError as error:
        return error.problems
    return []


@pytest.fixture(params=ROWS)
def kind(request: pytest.FixtureRequest, workspace: Any) -> str:
    workspace.write("train.jsonl", json.dumps(ROWS[request.param]) + "\n")
    return str(request.param)


def test_good_configurations_pass(kind: str) -> None:
    for overrides, world_size in [
        ([], None),
        (["actor.layout.tp=2", "actor.layout.pp=2"], 4),
        (["trainer.minibatch_size=32"], None),  # the value that null resolves to
        (["data.max_tokens=1024"], None),
        # These settings are ignored.
        (["rollout.layout.tp=3", "rollout.engine=hf", "rollout.sampling.temperature=0.001"], 2),
        (["reward.rules=[]", "reward.model.path=nowhere", "reward.model.layout.tp=7"], None),
        (["bridge.method=gather", "critic.path=nowhere", "critic.layout.tp=5"], None),
        (["algorithm.advantage=gae"], None),
        (["data.max_prompt_tokens=100000"], None),
        (["evaluate.samples=4"], None),
    ]:
        assert check(kind, *overrides, world_size=world_size) == []


def test_a_run_is_one_model(kind: str) -> None:
    cfg = load(kind, "actor.layout.pp=2", "rollout.layout.tp=8", "algorithm.advantage=gae", "reward.model.path=m")
    assert [role.name for role in role_layouts(cfg)] == ["actor"]
    assert (default_world_size(cfg), needs_critic(cfg), cfg.algorithm.kind) == (2, False, kind)
    assert needs_reference(cfg) == (kind == "dpo")
    validate(resolve(load(kind)))  # the printed configuration can be read again


def test_mistakes_are_refused(kind: str) -> None:
    for overrides, words in [
        (["trainer.minibatch_size=8"], ["minibatch_size=8", "one update", "prompts_per_step=32", "null"]),
        (["trainer.ppo_epochs=2"], ["trainer.ppo_epochs=2", "set it to 1"]),
        (["trainer.max_tokens_per_microbatch=1"], ["max_tokens_per_microbatch=1", "raise it"]),
        (["data.max_tokens=1025"], ["data.max_tokens=1025", "max_position_embeddings=1024"]),
        (["actor.optimizer.lr=1e-6", "actor.optimizer.schedule.min_lr=1e-5"], ["min_lr=1e-05", "lr=1e-06"]),
        (["data.train=[]"], ["data.train=[]"]),
        (["evaluate.every=2"], ["evaluate.every=2", "data.eval=[]"]),
        (["data.prompt_key=question"], ["no column 'question'", "prompt", "Set data.prompt_key"]),
    ]:
        worlds = {"actor.layout.pp=3": 3, "actor.layout.cp=2": 2}
        problems = check(kind, *overrides, world_size=worlds.get(overrides[0]))
        assert len(problems) == 1, problems
        assert all(word in problems[0] for word in words), problems


def test_an_unknown_kind(workspace: Any) -> None:
    assert any(
        "algorithm.kind='ranking'" in problem and "reward_model" in problem
        for problem in check("grpo", "algorithm.kind=ranking")
    )


def test_a_pair_needs_twice_the_room(workspace: Any) -> None:
    workspace.write("train.jsonl", json.dumps(PAIR) + "\n")
    assert check("reward_model", "data.max_tokens=100", "trainer.max_tokens_per_microbatch=200") == []
    (problem,) = check("reward_model", "data.max_tokens=100", "trainer.max_tokens_per_microbatch=199")
    assert "2 rows of data.max_tokens=100" in problem and "raise it to 200" in problem
    padded = ["actor.layout.tp=2", "actor.layout.sequence_parallel=true", "data.max_tokens=99"]
    assert "raise it to 200" in check("reward_model", *padded, "trainer.max_tokens_per_microbatch=198", world_size=2)[0]


def test_columns_that_are_missing_are_named(workspace: Any) -> None:
    workspace.write("train.jsonl", json.dumps(PAIR) + "\n")
    (problem,) = check("sft")
    assert all(word in problem for word in ["'response'", "data.response_key", "'messages'", *PAIR]), problem


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_columns_may_have_other_names(workspace: Any) -> None:
    workspace.write("train.jsonl", json.dumps({"q": "a", "good": "b", "bad": "c", "messages": MESSAGES}) + "\n")
    names = ["data.prompt_key=q", "data.chosen_key=good", "data.rejected_key=bad"]
    assert check("reward_model", *names) == []
    assert check("sft", "data.prompt_key=q", "data.response_key=good") == []
    assert check("sft") == [], "messages will do"


def test_which_heads_a_run_may_start_from(workspace: Any) -> None:
    workspace.write_hf_config("scorer", architectures=["Qwen3ForSequenceClassification"], id2label={"0": "LABEL_0"})
    workspace.write("scorer/model.safetensors", "")
    workspace.write("scorer/tokenizer.json", "{}")
    for kind, row in ROWS.items():
        workspace.write("train.jsonl", json.dumps(row) + "\n")
        problems = check(kind, "model.path=scorer")
        assert ("Qwen3ForSequenceClassification" in "".join(problems)) == (kind != "reward_model"), problems


def test_only_pairs_of_a_policy_look_at_a_reference(workspace: Any) -> None:
    for kind in ["sft", "reward_model"]:
        workspace.write("train.jsonl", json.dumps(ROWS[kind]) + "\n")
        assert check(kind, "reference.path=nowhere", "reference.refresh_steps=3") == []


def test_losses_over_pairs(workspace: Any) -> None:
    for loss in ["dpo", "ipo", "simpo", "orpo", "kto"]:
        workspace.write("train.jsonl", json.dumps(PAIR) + "\n")
        assert check(loss) == check(loss, "algorithm.dpo.beta=0.5", "actor.lora.rank=8") == []
        cfg = load(loss)
        assert (cfg.algorithm.kind, cfg.algorithm.dpo.loss) == ("dpo", loss)
        assert needs_reference(cfg) == (loss not in ("simpo", "orpo"))
        assert check("dpo", f"algorithm.dpo.loss={loss}") == [], "the same without its preset"


def test_mistakes_with_pairs_are_refused(workspace: Any) -> None:
    for preset, overrides, words in [
        (
            "kto",
            ["trainer.prompts_per_step=1"],
            ["trainer.prompts_per_step=1", "algorithm.dpo.loss=kto", "2 or more"],
        ),
        ("simpo", ["reference.path=ref"], ["reference.path=ref", "no effect", "algorithm.dpo.loss=simpo", "remove"]),
        ("dpo", ["algorithm.kl.coef=0.1"], ["algorithm.kl.coef=0.1", "no effect", "algorithm.dpo.beta", "remove"]),
        ("orpo", ["reference.refresh_steps=2"], ["reference.refresh_steps=2", "no effect", "remove"]),
        (
            "kto",
            ["reference.precompute=true"],
            ["reference.precompute=True", "algorithm.dpo.loss=kto", "set it to false"],
        ),
        ("dpo", ["reference.refresh_steps=2"], ["reference.refresh_steps=2", "algorithm.kind=dpo", "set it to 0"]),
        ("dpo", ["reference.path=nowhere"], ["reference.path", "nowhere"]),
        ("dpo", ["actor.lora.rank=8", "reference.path=ref"], ["actor.lora.rank=8", "reference.path=ref", "remove"]),
    ]:
        workspace.write_hf_config("ref", architectures=["Qwen3ForCausalLM"])
        workspace.write("ref/model.safetensors", "")
        workspace.write("ref/tokenizer.json", "{}")
        workspace.write("train.jsonl", json.dumps(ROWS.get(preset, PAIR)) + "\n")
        problems = check(preset, *overrides)
        assert len(problems) == 1, problems
        assert all(word in problems[0] for word in words), problems
