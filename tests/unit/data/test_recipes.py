from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf_mcore.commands.prepare_data.recipes import RECIPES, PreparedExample, RowError, recognise
from tests.commands import ROOT

GSM8K = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "In May 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72.\n#### 1,072",
}
MATH = {
    "problem": "What is $x$?",
    "level": "Level 3",
    "type": "Algebra",
    "solution": r"Thus $x = \boxed{\frac{1}{2}}$.",
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve.", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4", "split": "x"},
}


def one(recipe: str, row: dict[str, Any]) -> PreparedExample:
    (found,) = RECIPES[recipe]([("here", row)])
    assert isinstance(found, PreparedExample), found
    return found


def problem(recipe: str, row: dict[str, Any]) -> str:
    (found,) = RECIPES[recipe]([("file.jsonl, line 3", row)])
    assert isinstance(found, RowError), found
    return str(found)


def test_gsm8k() -> None:
    example = one("gsm8k", GSM8K)
    assert example.ground_truth == "1072"
    assert example.response == "In May 48/2 = 24.\nIn all 48+24 = 72.\n#### 1072"
    (message,) = example.prompt
    assert (
        message["role"] == "user" and message["content"].startswith("Natalia sold") and '"####"' in message["content"]
    )


def test_math() -> None:
    example = one("math", MATH)
    assert example.ground_truth == r"\frac{1}{2}"
    assert example.extra == {"level": "Level 3", "type": "Algebra"}
    assert r"\boxed{}" in example.prompt[0]["content"]
    assert one("math", {**MATH, "answer": "0.5"}).ground_truth == "0.5"


def test_dapo_and_our_own_schema() -> None:
    example = one("dapo", DAPO)
    assert (example.data_source, example.ability, example.ground_truth) == ("math_dapo", "math", "34")
    assert example.prompt == [{"role": "user", "content": "Solve."}]
    assert example.extra == {"index": "9a9b6eb4"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "input": "", "output": "b"},
        {"prompt": "a", "response": "b"},
        {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
        {"question": "a", "answer": "b"},
    ],
)
def test_chats_of_all_kinds(row: dict[str, Any]) -> None:
    example = one("chat", row)
    assert (example.prompt, example.response) == ([{"role": "user", "content": "a"}], "b")


def test_a_chat_that_waits_for_an_answer() -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    example = one("chat", {"messages": [{"role": role, "content": text} for role, text in turns]})
    assert [message["content"] for message in example.prompt] == ["s", "a", "b", "c"]
    assert example.response is None


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {
            "prompt": "a",
            "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}],
        },
        {
            "prompt": "a",
            "chosen": [{"role": "assistant", "content": "b"}],
            "rejected": [{"role": "assistant", "content": "c"}],
        },
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ],
)
def test_preferences_of_all_kinds(row: dict[str, Any]) -> None:
    example = one("preference", row)
    assert (example.prompt, example.chosen, example.rejected) == ([{"role": "user", "content": "a"}], "b", "c")


def test_a_transcript_of_several_turns() -> None:
    start = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
    example = one("preference", {"chosen": f"{start} d\n\ne", "rejected": f"{start} f"})
    assert [message["content"] for message in example.prompt] == ["a", "b", "c"]
    assert (example.chosen, example.rejected) == ("d\n\ne", "f")


@pytest.mark.parametrize(
    ("recipe", "row", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "42"}, "'answer' has no number after ####"),
        ("gsm8k", {"question": " ", "answer": "#### 1"}, "'question' must be a text that is not empty"),
        ("math", {"problem": "p", "solution": "so 3"}, r"'solution' has no \boxed{} answer"),
        ("dapo", {"prompt": "p", "reward_model": None}, "'reward_model' has no ground_truth"),
        ("dapo", {**DAPO, "prompt": 3}, "expected a text or a list of messages"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "role 'tool' is not one of"),
        ("chat", {"messages": [{"role": "user", "content": None}]}, "a message needs a text"),
        ("chat", {"messages": ["x"]}, "a message must be an object"),
        ("chat", {"prompt": "a", "response": " "}, "the response is empty"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same"),
        ("preference", {"chosen": "b", "rejected": "c"}, "there is no 'prompt'"),
        ("preference", {"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected' must be a text"),
        (
            "preference",
            {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: x\n\nAssistant: c"},
            "answer different prompts",
        ),
        ("preference", {"chosen": "\n\nHuman: a", "rejected": "c"}, "does not end with an assistant message"),
    ],
)
def test_unusable_rows_name_place_and_reason(recipe: str, row: dict[str, Any], message: str) -> None:
    found = problem(recipe, row)
    assert found.startswith("file.jsonl, line 3: ") and message in found


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GSM8K, "gsm8k"),
        (MATH, "math"),
        (DAPO, "dapo"),
        ({"prompt": {"text": "a"}}, "open_assistant"),
        ({"message_id": "1"}, "open_assistant"),
        ({"test_list": []}, "code"),
        ({"question": "a", "answer": "b"}, None),
        ({"messages": []}, "chat"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"x": 1}, None),
    ],
)
def test_shapes_are_recognised_by_their_columns(row: dict[str, Any], expected: str | None) -> None:
    assert recognise(row) == expected


def test_pairs_of_a_runs_own_responses() -> None:
    base = {
        "prompt_id": "train#1",
        "prompt": "<|user|>1+1=<|assistant|>",
        "ground_truth": "2",
        "failure": None,
        "step": 1,
    }
    kept = {**base, "finish_reason": "stop"}
    rows = [
        {**kept, "sample": 0, "response": "3", "score": 0.25},
        {**kept, "sample": 1, "response": "2", "score": 1.0},
        {**kept, "sample": 2, "response": "two", "score": 1.0},  # as good as the one before
        {**kept, "sample": 3, "response": "4", "score": 0.0, "failure": "the grader timed out"},
        {**base, "sample": 4, "response": "5 and", "score": -1.0, "finish_reason": "length"},
        {**kept, "sample": 5, "response": "1", "score": float("nan")},
        {**kept, "sample": 0, "response": "2", "score": 1.0, "step": 2},
        {**kept, "sample": 1, "response": "3", "score": 1.0, "step": 2},
    ]
    pair, equal = RECIPES["rollouts"]([(f"line {n}", row) for n, row in enumerate(rows)])
    assert isinstance(pair, PreparedExample) and isinstance(equal, PreparedExample)
    assert (pair.prompt, pair.chosen, pair.rejected, pair.place) == ("<|user|>1+1=<|assistant|>", "2", "3", "line 0")
    assert equal.chosen is None, "two scores that are equal say nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": [{"writer": "policy"}]}, "several turns"),
        ({"score": True}, "'score' a number"),
        ({"response": None}, "'response' must be a text"),
        ({"prompt": ""}, "'prompt' must be a text"),
    ],
)
def test_rollouts_that_make_no_pairs(change: dict[str, Any], message: str) -> None:
    row = {"prompt_id": "p", "sample": 0, "prompt": "<|user|>a", "response": "b", "score": 1.0} | change
    assert recognise(row) == "rollouts"
    assert message in problem("rollouts", row)


def test_the_page_lists_every_format() -> None:
    table = (ROOT / "docs" / "guide" / "data.md").read_text(encoding="utf-8").split("| format |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(RECIPES)
