"""Data and reward of every experiment belong together: an answer that is written as its prompt asks is paid."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands.prepare_data.recipes import GSM8K_INSTRUCTION, RECIPES, PreparedExample
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.reward import Graders, build_reward
from rlhf_mcore.types import Prompt
from tests.episodes import single_turn

EXPERIMENTS = sorted((Path(__file__).resolve().parents[3] / "configs" / "experiments").glob("*.yaml"))
# Rows as the data sets have them.
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": f"How many are {answer}?", "answer": f"It is {answer}.\n#### {answer}"}
        for answer in ("18", "1,072", "-5", "2.5", "70000")
    ],
    "math": [
        {"problem": f"Find {number}.", "solution": rf"Hence \boxed{{{answer}}}.", "level": "Level 5", "type": "Algebra"}
        for number, answer in enumerate(
            (r"\frac{1}{2}", "0,1", r"(3,\frac{\pi}{2})", r"2\sqrt{3}", "1,-2", r"48^\circ", r"\text{odd}")
        )
    ],
    "dapo": [
        {
            "data_source": "math_dapo",
            "prompt": [
                {"role": "user", "content": f"Solve. The last line has to be of the form Answer: $Answer.\n\n{n}"}
            ],
            "ability": "MATH",
            "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(n)},
        }
        for n, truth in enumerate(("34", "-7", "0", "1000000"))
    ],
}
# The recipes of the data that an experiment says to prepare; a reward model alone asks for no form, and Geometry3K is used as it is.
DATA = {
    "data/gsm8k": ["gsm8k"],
    "data/gsm8k-math": ["gsm8k", "math"],
    "data/dapo-math": ["dapo"],
    "data/geo3k": [],
    "data/prompts": [],
}


def examples(recipe: str) -> list[PreparedExample]:
    made = list(RECIPES[recipe]((f"row {number}", row) for number, row in enumerate(ROWS[recipe])))
    return [example for example in made if isinstance(example, PreparedExample)]


def as_asked(example: PreparedExample, answer: str) -> str:
    """A response in the form that the prompt asks for."""
    prompt = example.prompt[-1]["content"]
    if prompt.endswith(GSM8K_INSTRUCTION):
        return f"Let us see.\n#### {answer}"
    return f"Let us see.\nAnswer: {answer}" if "Answer: $Answer" in prompt else rf"Let us see. \boxed{{{answer}}}"


def scores(reward: Graders, recipe: str, responses: list[str]) -> list[float]:
    made = examples(recipe)
    rows = [
        single_turn(Prompt(str(n), n, [1], "", ground_truth=example.ground_truth), 0, [1], [0.0], text, "stop", 0)
        for n, (example, text) in enumerate(zip(made, responses, strict=True))
    ]
    return [score.value for score in run(reward.score(rows))]


@cache
def config(path: Path) -> Config:
    return load_config(path)


def pairs() -> list[tuple[Path, str]]:
    found = []
    for path in EXPERIMENTS:
        (folder,) = {str(Path(file).parent) for file in config(path).data.train}
        found += [(path, recipe) for recipe in DATA[folder]]
    return found


@pytest.mark.parametrize(("path", "recipe"), pairs(), ids=lambda each: each if isinstance(each, str) else each.stem)
def test_the_right_answer_as_the_prompt_asks_for_it_is_worth_the_most(path: Path, recipe: str) -> None:
    cfg = config(path)
    reward = build_reward(cfg.reward)
    most = sum(rule.weight * rule.correct for rule in cfg.reward.rules)
    made = examples(recipe)
    assert len(made) == len(ROWS[recipe])
    right = scores(reward, recipe, [as_asked(example, str(example.ground_truth)) for example in made])
    assert right == [most] * len(made)
    for wrong in ([""] * len(made), [as_asked(example, "123456") for example in made], ["I do not know."] * len(made)):
        assert max(scores(reward, recipe, wrong)) < most


def test_every_recipe_with_answers_is_graded_by_an_experiment() -> None:
    assert {recipe for _, recipe in pairs()} == set(ROWS)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_a_right_answer_that_is_too_long_is_worth_more_than_a_wrong_one(path: Path) -> None:
    cfg = resolve(config(path))
    penalty = cfg.algorithm.overlong.penalty if cfg.algorithm.overlong.enabled else 0.0
    for rule in cfg.reward.rules:
        assert rule.weight * rule.correct - penalty > rule.weight * rule.incorrect
