"""Several reward functions with weights beside rules, and functions that score a batch at once, in workers and in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import rlhf_mcore as rm
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import FunctionConfig, RewardConfig, RuleConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.rewards.reward import build_reward, scoring_keys
from rlhf_mcore.trainer.evaluation import is_correct
from rlhf_mcore.types import Prompt, Score, Trajectory
from tests.episodes import single_turn

FILE = """
import random, sys, time

def polite(data_source, solution_str, ground_truth, extra_info):
    return {"score": float("please" in solution_str), "length": len(solution_str)}

def brief(solution_str, **_):
    if solution_str == "raise":
        raise ValueError("no")
    return 1.0 / (1 + len(solution_str))

calls = []

def batch(completions, prompts, answer, level, trainer_state, completion_ids, **columns):
    calls.append(len(completions))
    assert prompts == ["What?"] * len(completions) and trainer_state.global_step == 0 and sorted(columns) == [
        "data_source", "extra_info", "ground_truth"], columns
    assert all(len(ids) == 1 for ids in completion_ids) and answer == columns["ground_truth"]
    return [len(calls) * 100 + len(completions) + level[0] + float(text == right) for text, right in zip(completions, answer)]

def some(completions, **_):
    return [None if text == "none" else 0.5 for text in completions]

def talk(completions, prompts, **_):
    return [float(message[-1]["content"] == prompt[0]["content"]) for message, prompt in zip(completions, prompts)]

def broken(completions, how=FAULT, **_):
    if how == "raise":
        raise KeyError("x")
    if how == "hang":
        time.sleep(60)
    return {"few": [1.0], "number": 1.0, "text": ["a", 1.0], "nan": [float("nan"), 1.0]}[how]

def needs(completions, difficulty):
    return [0.0] * len(completions)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FILE.replace("FAULT", "''"))
    return str(tmp_path / "mine.py")


def trajectory(text: str, index: int = 0, messages: Any = None, **extra: Any) -> Trajectory:
    prompt = Prompt(f"p{index}", index, [1], "What?", "sums", "42", extra_info={"level": 7, **extra}, messages=messages)
    return single_turn(prompt, 3, [5], [-0.1], text, "stop", 0)


def scores(cfg: RewardConfig, *texts: str, **more: Any) -> list[Score]:
    reward = build_reward(cfg)
    try:
        return run(reward.score([trajectory(text, n, **more) for n, text in enumerate(texts)]))
    finally:
        reward.close()


def test_functions_are_added_to_rules_by_their_weights(file: str) -> None:
    functions = [
        FunctionConfig(path=f"{file}:polite", weight=0.5),
        FunctionConfig(path=f"{file}:brief", weight=-2.0, name="brevity"),
    ]
    cfg = RewardConfig(rules=[RuleConfig(name="exact_match", weight=3.0)], functions=functions, workers=1)
    right, kind = scores(cfg, "42", "please")
    assert right.value == pytest.approx(3 + 0 - 2 / 3) and kind.value == pytest.approx(0 + 0.5 - 2 / 7)
    polite, brevity = "function.polite", "function.brevity"
    assert right.parts == {"exact_match": 1.0, polite: 0.0, f"{polite}.length": 2.0, brevity: pytest.approx(1 / 3)}
    assert is_correct(right.value, right.parts) and not is_correct(kind.value, kind.parts)  # the rule decides
    assert (
        scoring_keys(cfg)
        == f"reward.rules=[exact_match * 3] and reward.functions=[{file}:polite * 0.5, {file}:brief * -2]"
    )
    alone = RewardConfig(rules=[], functions=functions, workers=1)
    assert [score.value for score in scores(alone, "42")] == pytest.approx([-2 / 3])


def test_what_one_of_them_does_not_score_has_no_score(file: str) -> None:
    cfg = RewardConfig(rules=[], functions=[f"{file}:polite", f"{file}:brief"], on_error="zero", workers=1)  # type: ignore[list-item]
    fine, broken = scores(cfg, "please", "raise")
    assert fine.failure is None and broken.failure == "error" and broken.value == 0
    assert "reward.functions[1].path=" in broken.cause and "raised ValueError: no (mine.py, line 9)" in broken.cause
    cfg.on_error = "fail"
    with pytest.raises(ConfigError, match=r"reward\.functions\[1\]\.path=.*raised ValueError: no"):
        scores(cfg, "raise")


def test_a_function_of_a_batch_is_called_once_for_it_with_lists_of_columns(file: str) -> None:
    made = scores(RewardConfig(function=f"{file}:batch", workers=1), "42", "41", "43")
    assert [score.value for score in made] == [100 + 3 + 7 + 1, 100 + 3 + 7, 100 + 3 + 7]


def test_a_function_of_a_batch_from_python_is_called_in_this_process(file: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(FILE.replace("FAULT", "''"), names)
    made = scores(RewardConfig(function=OwnFunction(names["batch"])), "42", "41")
    assert [score.value for score in made] == [110, 109] and names["calls"] == [2]


def test_none_in_a_batch_adds_nothing_and_is_no_part(file: str) -> None:
    cfg = RewardConfig(rules=[RuleConfig(name="length")], functions=[FunctionConfig(path=f"{file}:some")], workers=1)
    none, half = scores(cfg, "none", "half")
    assert (none.value, none.parts) == (1.0, {"length": 1.0})
    assert (half.value, half.parts) == (1.5, {"length": 1.0, "function.some": 0.5})


def test_conversations_come_to_a_batch_as_messages(file: str) -> None:
    messages = [{"role": "user", "content": "echo"}]
    made = scores(RewardConfig(function=f"{file}:talk", workers=1), "echo", "else", messages=messages)
    assert [score.value for score in made] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("fault", "name", "problem"),
    [
        ("raise", "broken", r"raised KeyError: 'x' \(mine\.py, line \d+\)"),
        ("few", "broken", r"it must be a list of 2 scores, one for each completion"),
        ("number", "broken", r"returned 1\.0 \(float\): it must be a list of 2 scores"),
        ("text", "broken", r"returned 'a' \(str\) among others: the score must be a number"),
        ("nan", "broken", r"returned nan \(float\) among others: the score must be finite"),
        ("hang", "broken", r"gave no result within reward\.timeout_s=0\.5 s"),
        (
            "",
            "needs",
            r"requires 'difficulty', but gets only level, answer, .*: add this column to extra_info",
        ),
    ],
)
def test_a_batch_that_fails_has_no_scores(tmp_path: Path, fault: str, name: str, problem: str) -> None:
    (tmp_path / "mine.py").write_text(FILE.replace("FAULT", repr(fault)))
    cfg = RewardConfig(function=f"{tmp_path}/mine.py:{name}", on_error="zero", workers=1, timeout_s=0.5)
    made = scores(cfg, "a", "b")
    assert made[0].failure == ("timeout" if fault == "hang" else "error")
    assert made[1].failure == (None if fault in ("text", "nan") else made[0].failure)
    cfg.on_error = "fail"
    with pytest.raises(ConfigError, match=problem):
        scores(cfg, "a", "b")


def test_the_function_of_the_page_scores_as_it_says(tmp_path: Path) -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    page = (docs / "guide" / "rewards" / "functions.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(def various.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    made = scores(RewardConfig(function=f"{tmp_path}/mine.py:various", workers=1), "42", "41", "41")
    assert [score.value for score in made] == pytest.approx([1.1, 0.0, 0.0])


def test_functions_come_from_a_file_and_from_python(tmp_path: Path, file: str) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: m}\nreward: {rules: [], functions: [a.py:f]}\n")
    cfg = load_config(tmp_path / "run.yaml", ["reward.functions=[{path: b.py:g, weight: 0.5}, c.py:h]"])
    assert cfg.reward.functions == [FunctionConfig(path="b.py:g", weight=0.5), FunctionConfig(path="c.py:h")]

    def mine(solution_str: str, **_: Any) -> float:
        return 0.25

    from rlhf_mcore.api.inputs import run_config

    alone = [run_config(rm.Config(model="m"), {}, reward=given).reward for given in ("math", f"{file}:brief")]
    assert [rule.name for rule in alone[0].rules] == ["math"] and alone[1].functions[0].path == f"{file}:brief"
    made = run_config(rm.Config(model="m"), {}, reward=[mine, "exact_match", (f"{file}:brief", 2), ("format", 0.1)])
    assert [(rule.name, rule.weight) for rule in made.reward.rules] == [("exact_match", 1.0), ("format", 0.1)]
    assert [(one.path.rpartition(".")[2], one.weight) for one in made.reward.functions] == [
        ("mine", 1.0),
        ("py:brief", 2.0),
    ]
    (score,) = scores(made.reward, "42")
    assert score.value == pytest.approx(0.25 + 1 + 2 / 3)
    for wrong in ([], [3], [(mine, "x")], [mine, None], ["a.py:f", object()], [(mine, 1.0, 2)]):
        with pytest.raises(ConfigError, match=r"^reward=.* is not valid; give a function"):
            run_config(rm.Config(model="m"), {}, reward=wrong)


def test_rows_from_python_bring_their_columns(tmp_path: Path) -> None:
    from rlhf_mcore.api.inputs import rows_of

    row = {"prompt": "1+1=", "answer": "2", "level": 3, "extra_info": {"id": "a"}}
    written = json.loads(rows_of("prompts", [row], "prompt"))  # type: ignore[arg-type]
    assert written == {**row, "extra_info": {"level": 3, "id": "a"}}
