"""``cfg.a.b = value`` is checked at assignment. Lists changed in place are checked before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, is_group, value_of
from rlhf_mcore.config.schema import Config, RuleConfig, TrainerConfig
from rlhf_mcore.readers.user_functions import OwnFunction
from tests.messages import expect_error

WRONG: list[tuple[str, Any, str]] = [
    ("trainer.num_stepz", 3, "unknown key trainer.num_stepz; did you mean trainer.num_steps?"),
    ("seeed", 3, "unknown key seeed; did you mean seed?"),
    ("lr", 3, "unknown key lr; did you mean actor.optimizer.lr?"),
    ("critic.layout.tpp", 2, "unknown key layout.tpp; did you mean layout.tp?"),
    ("bridge.qwertzuiop", 2, "unknown key bridge.qwertzuiop; the keys of bridge are: "),
    ("seed", None, "seed=None is not valid; expected int"),
    ("seed", True, "seed=True is not valid; expected int"),
    ("seed", -1, "seed=-1 is out of range; it must be at least 0"),
    ("trainer.num_steps", 1.5, "trainer.num_steps=1.5 is not valid; expected int"),
    ("trainer.num_steps", [3], "trainer.num_steps=[3] is not valid; expected int"),
    ("actor.optimizer.lr", float("inf"), "optimizer.lr=inf is out of range; it must be at least 0"),
    ("actor.optimizer.lr", 1j, "optimizer.lr=1j is not valid; expected float"),
    ("actor.layout.tp", None, "layout.tp=None is not valid; expected int"),
    ("deterministic", "perhaps", "deterministic='perhaps' is not valid; expected bool"),
    ("output_dir", 5, "output_dir=5 is not valid; expected str"),
    ("data.train", None, "data.train=None is not valid; expected list of str"),
    ("data.train", [1], "data.train[0]=1 is not valid; expected list of str"),
    ("data.answer_key", 7, "data.answer_key=7 is not valid; expected str or list of str"),
    ("trainer", 3, "trainer=3: trainer is a group, not a value; set one of its keys: trainer.num_steps, "),
    ("trainer", {"num_stepz": 3}, "unknown key trainer.num_stepz; did you mean trainer.num_steps?"),
    ("rollout.engine", "vlm", "rollout.engine='vlm' is not a choice; did you mean 'vllm'? There are: "),
    ("reward.rules", 5, "reward.rules[0]=5 is not valid; expected list of {name, weight, "),
    ("reward.rules", [{"nam": "math"}], "unknown key reward.rules[0].nam; there are: name, "),
    ("reward.rules", [{"name": "math", "weight": "x"}], "reward.rules[0].weight='x' is not valid; expected float"),
    ("reward.rules", [{"name": "math", "test_s": -1}], "reward.rules[0].test_s=-1 is out of range"),
    ("reward.sources", {"a": 3}, "is not valid"),
    ("reward.function", print, "give a function itself as rm.train(cfg, reward=...)"),
    ("environment.options", {"a": object()}, "is not valid; expected a table of names"),
    ("environment.options", [1], "environment.options=[1] is not valid; expected a table of names"),
]


def test_what_a_key_does_not_take_is_refused_when_it_is_assigned() -> None:
    for key, value, problem in WRONG:
        cfg = Config()
        group, _, name = key.rpartition(".")
        owner = value_of(cfg, group) if group else cfg
        with pytest.raises(ConfigError) as refused:
            setattr(owner, name, value)
        assert problem in str(refused.value), (key, str(refused.value))
        assert cfg == Config(), "and nothing has changed"


def test_values_that_mean_one_of_the_type_are_taken_as_such() -> None:
    cfg = Config()
    cfg.trainer.num_steps = np.int64(4)  # type: ignore[assignment]
    cfg.actor.optimizer.lr = 1
    cfg.critic.optimizer.lr = np.float32(0.5)  # type: ignore[assignment]
    cfg.deterministic = np.bool_(True)  # type: ignore[assignment]
    cfg.output_dir = Path("here")  # type: ignore[assignment]
    cfg.data.train = "train.jsonl"  # type: ignore[assignment]
    cfg.data.eval = (Path("eval.jsonl"),)  # type: ignore[assignment]
    cfg.data.answer_key = ["answer", None]
    cfg.reward.rules = ["math", {"name": "format", "weight": 1}]  # type: ignore[list-item]
    cfg.reward.sources = {"mine": "boxed"}  # type: ignore[dict-item]
    cfg.environment.options = {"limit": np.int32(3), "deep": {"file": Path("x")}}
    cfg.evaluate = {"every": 5}  # type: ignore[assignment]
    plain = [cfg.trainer.num_steps, cfg.actor.optimizer.lr, cfg.critic.optimizer.lr, cfg.deterministic, cfg.output_dir]
    assert plain == [4, 1.0, 0.5, True, "here"]
    assert list(map(type, plain)) == [int, float, float, bool, str]
    assert cfg.data.train == ["train.jsonl"] and cfg.data.eval == ["eval.jsonl"]
    assert cfg.data.answer_key == ["answer", None]
    assert cfg.reward.rules == [RuleConfig(name="math"), RuleConfig(name="format", weight=1.0)]
    assert cfg.reward.sources == {"mine": [RuleConfig(name="boxed")]}
    assert cfg.environment.options == {"limit": 3, "deep": {"file": "x"}}
    assert cfg.evaluate.every == 5


def test_a_function_stays_a_function() -> None:
    def grade(text: str) -> float:
        return 1.0

    cfg = Config()
    cfg.reward.function = OwnFunction(grade)
    cfg.reward.functions = [{"path": OwnFunction(grade)}]  # type: ignore[list-item]
    for kept in (cfg, cfg.updated(), cfg.model_copy(deep=True)):
        assert kept.reward.function.function is grade  # type: ignore[union-attr]
        assert kept.reward.functions[0].path.function is grade  # type: ignore[attr-defined]


def test_every_default_is_of_its_type() -> None:
    cfg, default = Config(), Config()
    for key in KEYS:
        if not is_group(key):
            group, _, name = key.rpartition(".")
            setattr(value_of(cfg, group) if group else cfg, name, value_of(default, key))
    assert cfg == default == Config(algorithm={})


def test_what_was_changed_in_place_is_checked_before_a_run() -> None:
    cfg = Config()
    cfg.data.train.append(3)  # type: ignore[arg-type]
    cfg.reward.rules.append({"name": "math"})  # type: ignore[arg-type]
    cfg.reward.rules.append({"nam": "math"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        cfg.updated()
    problems = sorted(refused.value.problems)
    assert len(problems) == 2 and problems[0].startswith("data.train[0]=3") and "reward.rules[2].nam" in problems[1]
    cfg.data.train.clear()
    cfg.reward.rules.pop()
    assert cfg.updated().reward.rules[-1] == RuleConfig(name="math")


def test_settings_are_keywords_groups_or_dotted_keys() -> None:
    cfg = Config(
        {"actor.optimizer.lr": 1e-5, "seed": 1}, model="m", algorithm="dr_grpo", trainer={"num_steps": 7}, seed=2
    )
    assert (cfg.actor.optimizer.lr, cfg.seed, cfg.model.path, cfg.trainer.num_steps) == (1e-5, 2, "m", 7)
    assert cfg.algorithm.loss_aggregation == "constant"  # set by the preset
    assert Config({"algorithm": "dr_grpo", "algorithm.loss_aggregation": "token"}).algorithm.loss_aggregation == "token"
    assert Config(trainer=TrainerConfig(num_steps=3)).trainer.num_steps == 3
    assert Config(cfg.model_dump()) == cfg
    assert eval(repr(Config(seed=5))) == Config(seed=5)
    with pytest.raises(ConfigError) as refused:
        Config({"seed": "x", "trainer.num_stepz": 1, "data": {"train": [1]}})
    assert len(refused.value.problems) == 3


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def test_a_value_that_cannot_be_shown_is_refused_by_its_type() -> None:
    for key, shown in (("actor", "actor"), ("actor.optimizer.lr", "optimizer.lr"), ("data.train", "data.train")):
        group, _, name = key.rpartition(".")
        for value in (Unshown(), [Unshown()]):
            with expect_error(ConfigError, field=shown, value="Unshown"):
                setattr(value_of(Config(), group) if group else Config(), name, value)
