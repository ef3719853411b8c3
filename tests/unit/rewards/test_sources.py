"""Choose rules by data source: own rules, sources without rules, and the cost of shared graders."""

from __future__ import annotations

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import SOURCES, any_needs_truth, rules_of
from rlhf_mcore.config.rules.reward import rule_problems
from rlhf_mcore.config.schema import Config, RewardConfig, RuleConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.reward import build_reward, check_sources
from rlhf_mcore.types import Prompt, Trajectory
from tests.episodes import single_turn
from tests.messages import expect_error


def prompt(source: str, truth: object = "42") -> Prompt:
    return Prompt("p", 0, [1], "Q", data_source=source, ground_truth=truth)


def trajectory(source: str, text: str, truth: object = "42") -> Trajectory:
    return single_turn(prompt(source, truth), 0, [1], [0.0], text, "stop", 0)


def test_every_source_is_graded_by_its_own_rules() -> None:
    table = {"mine": [RuleConfig(name="exact_match", weight=3.0), RuleConfig(name="length", weight=0.5, max_chars=1)]}
    rows = [
        trajectory("openai/gsm8k", "#### 42"),
        trajectory("mine", "42"),
        trajectory("math_dapo", "Answer: 42"),
        trajectory("math_dapo", "Answer: 41"),
        trajectory("HuggingFaceH4/MATH-500", r"\boxed{42}"),
        trajectory("openai/gsm8k", "42"),
    ]
    scores = run(build_reward(RewardConfig(sources=table)).score(rows))
    assert [score.value for score in scores] == [1.0, 3.0, 1.0, -1.0, 1.0, 0.0]
    assert scores[1].parts == {"exact_match": 1.0, "length": 0.0}
    assert scores[2].parts == {"answer_line": 1.0}
    assert [score.answered for score in scores] == [True, True, True, True, True, False]


def test_the_table_of_the_user_wins_and_the_longest_beginning() -> None:
    own = {
        "aime*": [RuleConfig(name="boxed")],
        "aime24*": [RuleConfig(name="math")],
        "gsm8k": [RuleConfig(name="boxed")],
    }
    assert [rules_of(source, own)[0].name for source in ("aime25", "aime24_x", "gsm8k")] == ["boxed", "math", "boxed"]
    assert rules_of("gsm8k", {})[0].name == "final_number"
    assert rules_of("gsm8", {}) is None
    assert rules_of("gsm8", {"*": [RuleConfig(name="math")]})[0].name == "math"


def test_a_source_without_rules_is_named_with_its_rows_and_the_key() -> None:
    prompts = [prompt("mystery"), prompt("gsm8k"), prompt("mystery"), prompt("riddle")]
    with pytest.raises(ConfigError) as error:
        check_sources(prompts, {}, "data.train")
    message = str(error.value)
    assert "data.train has prompts from data sources without rules in reward.sources" in message
    assert "'mystery' (2 rows), 'riddle' (1 rows)" in message
    assert "{'mystery': [{name: math}]}" in message
    check_sources(prompts, None, "data.train")
    check_sources(prompts, {"*": [RuleConfig(name="math")]}, "data.train")
    with pytest.raises(ConfigError, match="'mystery'"):
        run(build_reward(RewardConfig(sources={})).score([trajectory("mystery", "42")]))


def test_a_wrong_table_is_refused_by_its_key() -> None:
    table = {
        "b": [],
        "c": [RuleConfig(name="math", max_chars=3), RuleConfig(name="length", min_chars=5, max_chars=3)],
    }
    problems = "\n".join(rule_problems(RewardConfig(sources=table)))
    with expect_error(ConfigError, field="reward.sources.a[0].name", value="'mat'", remedy="did you mean 'math'?"):
        Config({"reward.sources": {"a": "mat"}})
    assert "reward.sources[b] is empty" in problems
    assert "reward.sources[c][0].max_chars=3 is an option of the rule 'length', not of 'math'" in problems
    assert "reward.sources[c][1].max_chars=3 is below min_chars=5" in problems


def test_the_built_in_rules_are_sound() -> None:
    assert list(rule_problems(RewardConfig(sources=SOURCES))) == []
    assert any_needs_truth(RewardConfig(sources={}))
    assert not any_needs_truth(RewardConfig(rules=[RuleConfig(name="regex", pattern="x"), RuleConfig(name="format")]))
    assert any_needs_truth(RewardConfig(rules=[RuleConfig(name="regex")]))


VERL = [
    "openai/gsm8k",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math_dapo",
    "math",
]
VERL += ["math_dapo_reasoning", "aime_2024", "aime25", "numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"]
VERL += [
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
    "hiyouga/geometry3k",
    "BytedTsinghua-SIA/DAPO-Math-17k",
]


@pytest.mark.parametrize("source", VERL)
def test_the_sources_that_verl_names_are_known(source: str) -> None:
    right = {"math_dapo": "Answer: 42", "openai/gsm8k": "#### 42"}
    text = right.get(source, "<think>x</think> \\boxed{42}\nAnswer: 42")
    assert run(build_reward(RewardConfig(sources={})).score([trajectory(source, text)]))[0].value == 1.0
