"""Test configurations with a teacher: required and rejected settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.validate import validate
from tests.messages import assert_names


def check(*overrides: str) -> list[str]:
    try:
        validate(load_config("run.yaml", list(overrides)))
    except ConfigError as error:
        return error.problems
    return []


@pytest.fixture(autouse=True)
def models(workspace: Any) -> None:
    workspace.write("context.py", "def hint(prompt, ground_truth, extra_info, data_source):\n    return prompt\n")
    for name, changes in {"teacher": {"hidden_size": 384}, "small": {"vocab_size": 50}}.items():
        workspace.write_hf_config(name, **changes)
        workspace.write(f"{name}/model.safetensors", "")
        workspace.write(f"{name}/tokenizer.json", "{}")


REVERSE = "teacher.divergence=reverse_kl"
HINT = "teacher.context=context.py:hint"


def test_good_configurations_pass() -> None:
    for overrides in [
        ["algorithm=distillation", "teacher.path=teacher"],
        ["algorithm=distillation", "teacher.path=teacher", "reward.rules=[]"],
        ["algorithm=grpo", "teacher.path=teacher", "teacher.coef=0.2", "teacher.layout.tp=2", "trainer.world_size=2"],
        ["algorithm=ppo", "teacher.path=teacher", "teacher.offload=by_layer"],
        ["algorithm=distillation", "teacher.path=teacher", "teacher.sources={math: teacher}", "teacher.divergence=jsd"],
        [
            "algorithm=distillation",
            "teacher.weights=actor",
            "teacher.context=context.py:hint",
            "teacher.top_k=8",
            REVERSE,
        ],
        ["algorithm=grpo", "teacher.weights=actor", "teacher.context=context.py:hint", "actor.lora.rank=4"],
        ["algorithm=distillation", "teacher.weights=average", "teacher.decay=0.9", "teacher.offload=always"],
    ]:
        assert check(*overrides) == []


TAUGHT = ["algorithm=distillation", "teacher.path=teacher"]


def test_mistakes_are_refused() -> None:
    for overrides, words in [
        (["algorithm=distillation"], ["teacher.path=null", "algorithm.advantage=distillation", "a model directory"]),
        (["teacher.coef=0.5"], ["teacher.coef=0.5", "no effect", "teacher.path=null", "remove it"]),
        (["algorithm=distillation", "teacher.path=nowhere"], ["teacher.path=nowhere"]),
        (["algorithm=distillation", "teacher.path=small"], ["teacher.path=small", "vocab_size=50", "100", "choose"]),
        (
            [*TAUGHT, "algorithm.dynamic_sampling.enabled=true"],
            ["dynamic_sampling.enabled=True", "reads no score", "false"],
        ),
        ([*TAUGHT, "teacher.sources={math: small}"], ["teacher.sources[math]=small", "vocab_size=50"]),
        (["teacher.sources={math: teacher}"], ["teacher.sources", "no effect", "teacher.path=null"]),
        ([*TAUGHT, "teacher.weights=actor", HINT], ["teacher.path=teacher", "no effect", "teacher.weights=actor"]),
        (["algorithm=distillation", "teacher.weights=actor"], ["teacher.weights=actor", "teacher.context", "average"]),
        (
            ["algorithm=distillation", "teacher.weights=average", "actor.lora.rank=4"],
            ["teacher.weights=average", "actor.lora.rank=4", "teacher.weights=actor"],
        ),
        (
            ["algorithm=distillation", "teacher.weights=average", "teacher.layout.tp=2", "trainer.world_size=2"],
            ["teacher.layout.tp=2", "no effect", "teacher.weights=average"],
        ),
        ([*TAUGHT, "teacher.context=context.py:other"], ["teacher.context=context.py:other", "does not define other"]),
        ([*TAUGHT, "teacher.context=nowhere.py:hint"], ["teacher.context", "does not exist"]),
    ]:
        problems = check(*overrides)
        assert len(problems) == 1, problems
        assert all(word in problems[0] for word in words), problems


def test_another_tokenizer_is_refused_with_its_first_difference(workspace: Any) -> None:
    for name, vocab in {"model": {"a": 0, "b": 1}, "teacher": {"a": 1, "b": 0}}.items():
        workspace.write(f"{name}/tokenizer.json", json.dumps({"model": {"vocab": vocab}}))
    (problem,) = check(*TAUGHT)
    assert all(word in problem for word in ("teacher.path=teacher", "token 0", "'a'", "'b'", "model.tokenizer_path")), (
        problem
    )


def test_a_tokenizer_that_cannot_be_read_is_refused(workspace: Any) -> None:
    workspace.write("teacher/tokenizer.json", '{"a":')
    (problem,) = check(*TAUGHT)
    assert_names(
        problem, field="teacher.path=teacher", value="tokenizer.json", remedy="download or export the model again"
    )


def test_a_choice_that_is_misspelt_makes_no_other_key_a_problem() -> None:
    (problem,) = check(*TAUGHT, "teacher.weights=averge")
    assert_names(problem, field="teacher.weights", value="'averge'", remedy=("path", "actor", "average"))
