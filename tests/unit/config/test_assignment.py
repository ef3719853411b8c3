"""``cfg.a.b = value`` is checked when it is assigned, and lists that were changed in place are before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.config.assignment import check_types
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, is_group, value_of
from rlhf_mcore.config.schema import Config, RuleConfig

WRONG: list[tuple[str, Any, str]] = [
    ("trainer.num_stepz", 3, "unknown key trainer.num_stepz; did you mean trainer.num_steps?"),
    ("seeed", 3, "unknown key seeed; did you mean seed?"),
    ("lr", 3, "unknown key lr; did you mean actor.optimizer.lr?"),
    ("critic.layout.tpp", 2, "unknown key layout.tpp; did you mean layout.tp?"),
    ("bridge.qwertzuiop", 2, "unknown key bridge.qwertzuiop; the keys of bridge are: "),
    ("seed", None, "seed=None is not valid; expected int"),
    ("seed", "3", "seed='3' is not valid; expected int"),
    ("seed", True, "seed=True is not valid; expected int"),
    ("trainer.num_steps", 1.5, "trainer.num_steps=1.5 is not valid; expected int"),
    ("trainer.num_steps", 2.0, "trainer.num_steps=2.0 is not valid; expected int"),
    ("trainer.num_steps", [3], "trainer.num_steps=[3] is not valid; expected int"),
    ("trainer.num_steps", np.float64(2), "is not valid; expected int"),
    ("actor.optimizer.lr", "1e-4", "optimizer.lr='1e-4' is not valid; expected float"),
    ("actor.optimizer.lr", 10**400, "is not valid; expected float"),
    ("actor.optimizer.lr", 1j, "optimizer.lr=1j is not valid; expected float"),
    ("actor.layout.tp", None, "layout.tp=None is not valid; expected int"),
    ("deterministic", 1, "deterministic=1 is not valid; expected bool"),
    ("deterministic", "yes", "deterministic='yes' is not valid; expected bool"),
    ("output_dir", 5, "output_dir=5 is not valid; expected str"),
    ("output_dir", b"x", "output_dir=b'x' is not valid; expected str"),
    ("data.train", None, "data.train=None is not valid; expected list of str"),
    ("data.train", [1], "data.train=[1] is not valid; expected list of str"),
    ("data.train", {"a": 1}, "data.train={'a': 1} is not valid; expected list of str"),
    ("data.prompt_key", None, "data.prompt_key=None is not valid; expected str or list of str"),
    ("data.answer_key", 7, "data.answer_key=7 is not valid; expected str or list of str"),
    ("trainer", {"num_steps": 3}, "trainer is a group, not a value; set one of its keys: trainer.num_steps, "),
    ("trainer", Config(), "trainer is a group, not a value"),
    ("algorithm", "dr_grpo", r"give a preset when the configuration is made: rm.Config(algorithm='dr_grpo')"),
    ("algorithm.preset", "dr_grpo", "algorithm.preset='dr_grpo' would change nothing but the name of 'grpo'"),
    ("reward.rules", 5, "reward.rules=5 is not valid; expected list of {name, weight, "),
    ("reward.rules", [{"nam": "math"}], "reward.rules=[{'nam': 'math'}] is not valid"),
    ("reward.rules", [{"name": "math", "weight": "x"}], "reward.rules[].weight='x' is not valid; expected float"),
    ("reward.sources", {"a": 3}, "reward.sources={'a': 3} is not valid"),
    ("reward.sources", {3: []}, "reward.sources={3: []} is not valid"),
    ("reward.function", print, "give a function itself as rm.train(cfg, reward=...)"),
    ("environment.options", {"a": object()}, "is not valid; expected a table of names"),
    ("environment.options", [1], "environment.options=[1] is not valid; expected a table of names"),
    ("rollout.sampling", None, "rollout.sampling is a group, not a value"),
]


def test_what_a_key_does_not_take_is_refused_when_it_is_assigned() -> None:
    for key, value, problem in WRONG:
        cfg = Config()
        group, _, name = key.rpartition(".")
        owner = value_of(cfg, group) if group else cfg
        with pytest.raises(ConfigError) as refused:
            setattr(owner, name, value)
        assert problem in str(refused.value)
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
    plain = [cfg.trainer.num_steps, cfg.actor.optimizer.lr, cfg.critic.optimizer.lr, cfg.deterministic, cfg.output_dir]
    assert plain == [4, 1.0, 0.5, True, "here"]
    assert list(map(type, plain)) == [int, float, float, bool, str]
    assert cfg.data.train == ["train.jsonl"] and cfg.data.eval == ["eval.jsonl"]
    assert cfg.data.answer_key == ["answer", None]
    assert cfg.reward.rules == [RuleConfig("math"), RuleConfig("format", 1.0)]
    assert cfg.reward.sources == {"mine": [RuleConfig("boxed")]}
    assert cfg.environment.options == {"limit": 3, "deep": {"file": "x"}}


def test_every_default_is_of_its_type() -> None:
    cfg, default = Config(), Config()
    for key in KEYS:
        if not is_group(key):
            group, _, name = key.rpartition(".")
            setattr(value_of(cfg, group) if group else cfg, name, value_of(default, key))
    assert cfg == default


def test_what_was_changed_in_place_is_checked_before_a_run() -> None:
    cfg = Config()
    cfg.data.train.append(3)  # type: ignore[arg-type]
    cfg.reward.rules.append({"name": "math"})  # type: ignore[arg-type]
    cfg.reward.rules.append({"nam": "math"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        check_types(cfg)
    problems = refused.value.problems
    assert len(problems) == 2 and problems[0].startswith("reward.rules=") and problems[1].startswith("data.train=[3]")
    cfg.data.train.clear()
    cfg.reward.rules.pop()
    check_types(cfg)
    assert cfg.reward.rules[-1] == RuleConfig("math")
