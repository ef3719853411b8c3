"""Rule sums and custom functions: values, parts, and every way a function can go wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf_mcore.config import choices
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config, RewardConfig, RewardModelConfig, RuleConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards import function
from rlhf_mcore.rewards.function import PooledReward
from rlhf_mcore.rewards.reward import RuleReward, build_reward
from rlhf_mcore.trainer.evaluation import is_correct
from rlhf_mcore.types import Prompt, Trajectory
from tests.episodes import single_turn
from tests.messages import expect_error


def trajectory(text: str, truth: object = "42", prompt_id: str = "train-7", **extra: object) -> Trajectory:
    prompt = Prompt(prompt_id, 7, [1, 2], "What?", data_source="sums", ground_truth=truth, extra_info=dict(extra))
    return single_turn(prompt, 3, [5], [-0.1], text, "stop", policy_version=0)


@pytest.fixture
def write(tmp_path: Path):
    """Write a reward file and return the spec of its function ``grade``."""

    def write_file(source: str) -> str:
        path = tmp_path / "my_reward.py"
        path.write_text(source)
        return f"{path}:grade"

    return write_file


def build_function_reward(spec: str) -> PooledReward:
    return function.build_function_reward(RewardConfig(function=spec, workers=1))


def test_the_configuration_knows_every_rule():
    assert {name for name, told in choices.GRADERS.items() if not told.needs_answer} == {"format", "length", "language"}


def test_rules_are_a_weighted_sum_with_unweighted_parts():
    reward = RuleReward([RuleConfig(name="final_number", weight=2.0), RuleConfig(name="format", weight=0.25)])
    scores = run(reward.score([trajectory("#### 42"), trajectory("#### 41"), trajectory("42")]))
    # 2 * 1 + 0.25 * 1; 2 * 0 + 0.25 * 1; 0
    assert [score.value for score in scores] == [2.25, 0.25, 0.0]
    assert scores[1].parts == {"final_number": 0.0, "format": 1.0}


def test_wrong_rules_are_refused_all_at_once():
    with pytest.raises(ConfigError) as error:
        Config({"reward.rules": ["finalnumber", {"name": "format", "weight": float("nan")}]})
    message = str(error.value)
    assert "reward.rules[0].name='finalnumber' is not a choice; did you mean 'final_number'?" in message
    assert "reward.rules[1].weight=nan is out of range" in message
    with pytest.raises(ConfigError, match=r"reward\.rules\[1\]\.name='boxed' occurs twice"):
        build_reward(RewardConfig(rules=[RuleConfig(name="boxed"), RuleConfig(name="boxed")]))
    with pytest.raises(ConfigError, match=r"reward\.rules is empty"):
        build_reward(RewardConfig(rules=[]))


def test_a_reward_model_may_be_alone():
    alone = build_reward(RewardConfig(rules=[], model=RewardModelConfig(path="rm")))
    assert [score.value for score in run(alone.score([trajectory("42"), trajectory("7")]))] == [0.0, 0.0]


def test_a_prompt_without_ground_truth_is_refused_unless_no_rule_needs_it():
    with expect_error(ValueError, field="data.answer_key", value=("train-7", "final_number")):
        run(
            RuleReward([RuleConfig(name="format"), RuleConfig(name="final_number")]).score(
                [trajectory("#### 42", truth=None)]
            )
        )
    assert run(RuleReward([RuleConfig(name="format")]).score([trajectory("#### 42", truth=None)]))[0].value == 1.0


def test_build_reward_prefers_the_function(write):
    rules = [RuleConfig(name="exact_match", weight=3.0)]
    assert run(build_reward(RewardConfig(rules=rules)).score([trajectory("42")]))[0].value == 3.0
    spec = write("def grade(data_source, solution_str, ground_truth, extra_info): return 5")
    assert run(build_reward(RewardConfig(rules=rules, function=spec)).score([trajectory("42")]))[0].value == 5.0
    assert run(build_reward(RewardConfig()).score([trajectory("#### 42")]))[0].parts == {"final_number": 1.0}


def test_a_function_gets_the_four_arguments_by_position(write):
    spec = write(
        "def grade(source, text, truth, info):\n"
        "    assert (source, text, truth, info) == ('sums', 'hi', '42', {'level': 2})\n"
        "    info.clear()\n"
        "    return 0.5\n"
    )
    sample = trajectory("hi", level=2)
    assert (
        run(build_function_reward(spec).score([sample, sample]))[1].value == 0.5
    )  # the prompt's own dict was not cleared


def test_parameters_of_the_known_names_may_come_in_any_order(write):
    spec = write(
        "def grade(solution_str, ground_truth, extra_info=None, data_source=None, **kwargs):\n"
        "    return float((data_source, solution_str, ground_truth, extra_info) == ('sums', 'hi', '42', {}))\n"
    )
    assert run(build_function_reward(spec).score([trajectory("hi")]))[0].value == 1.0


def test_a_dict_carries_parts(write):
    spec = write("def grade(*a): return {'score': True, 'length': 12, 'accuracy': 0.5, 'prediction': '41', 'x': None}")
    (score,) = run(build_function_reward(spec).score([trajectory("hi")]))
    assert score.value == 1.0
    assert score.parts == {"function.length": 12.0, "accuracy": 0.5}  # no grade of the rule length
    assert not is_correct(0.5, score.parts)


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ("None", r"returned None \(NoneType\): the score must be a number"),
        ("'1.0'", r"returned '1.0' \(str\): the score must be a number"),
        ("float('nan')", r"returned nan \(float\): the score must be finite"),
        ("-float('inf')", r"returned -inf \(float\): the score must be finite"),
        ("1e300", r"must be finite"),  # inf in float32
        ("10 ** 400", r"must be finite"),
        ("[1.0]", r"returned \[1.0\] \(list\)"),
        ("1j", r"must be a number"),
        ("{}", r"needs the key 'score'"),
        ("{'Score': 1.0}", r"needs the key 'score'"),
        ("{'score': None}", r"the entry 'score' must be a number"),
        ("{'score': float('nan')}", r"the entry 'score' must be finite"),
        ("{'score': 1.0, 'kl': float('inf')}", r"the entry 'kl' must be finite"),
        ("1 / 0", r"raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_result_names_function_prompt_and_value(write, returned: str, complaint: str):
    reward = build_function_reward(write(f"def grade(*a): return {returned}"))
    with pytest.raises(ValueError, match=r"my_reward\.py:grade on prompt 'train-7', sample 3, .*" + complaint):
        run(reward.score([trajectory("hi")]))


def test_a_huge_result_is_abridged(write):
    with pytest.raises(ValueError) as error:
        run(build_function_reward(write("def grade(*a): return 'x' * 10 ** 6")).score([trajectory("hi")]))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def other(*a): return 1", r"defines no 'grade'"),
        ("grade = 3", r"'grade' is not a function \(int\): name a function"),
        ("def grade(:", r"fails to import \(SyntaxError"),
        ("import no_such_module_anywhere", r"fails to import \(ModuleNotFoundError"),
    ],
)
def test_a_broken_file_is_a_config_error(write, source: str, complaint: str):
    with pytest.raises(ConfigError, match=r"reward\.function is .*" + complaint):
        build_function_reward(write(source))


@pytest.mark.parametrize("spec", ["my_reward.py", ":grade", "my_reward.py:", ""])
def test_a_spec_without_file_or_name_is_a_config_error(spec: str):
    with pytest.raises(ConfigError, match=r"reward\.function is .*path/to/file\.py:name"):
        build_function_reward(spec)


def test_a_missing_file_and_a_file_of_another_kind_are_config_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"reward\.function is .*there is no file .*absent\.py"):
        build_function_reward(f"{tmp_path}/absent.py:grade")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"reward\.function is .*not a Python file"):
        build_function_reward(f"{tmp_path}/notes.txt:grade")


def test_a_file_with_a_dataclass_loads_and_shadows_nothing(tmp_path: Path):
    path = tmp_path / "json.py"  # named like a module of the standard library
    path.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Grade:\n"
        "    value: float\n"
        "def grade(data_source, solution_str, ground_truth, extra_info):\n"
        "    return Grade(0.75).value\n"
    )
    import json

    assert run(build_function_reward(f"{path}:grade").score([trajectory("hi")]))[0].value == 0.75
    assert sys.modules["json"] is json
