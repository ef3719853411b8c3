"""Tools: their results, their errors, and their descriptions for a policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.rules.environment import read_tools
from rlhf_mcore.environments.tools import Index, Tools


def test_each_call_has_a_message_and_a_turn_without_one_ends_the_episode(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def shout(text):\n    return text.upper()\n")
    tools = Tools(["calculator", f"{tmp_path}/own.py:shout"], max_chars=6)
    said = "I need <tool>calculator 6*7</tool> and <tool>shout so much</tool> <tool>phone home</tool>"
    assert tools.step(said) == (
        [
            {"role": "tool", "content": "42"},
            {"role": "tool", "content": "SO MUC"},
            {"role": "tool", "content": "there is no tool phone; there is: calculator, shout"},
        ],
        0.0,
        False,
    )
    assert tools.step("it is 42") == ([], 0.0, True)


def test_parsed_calls_give_a_tool_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def repeat(text, times=1):\n    return text * times\n")
    tools = Tools(["calculator", f"{tmp_path}/own.py:repeat"])
    calls = [
        ("calculator", '{"expression": "6*7"}'),
        ("repeat", '{"text": "ab", "times": 2}'),
        ("repeat", '{"txt": "ab"}'),
        ("calculator", "6*7"),
        ("phone", "{}"),
    ]
    message = {"content": "", "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls]}
    answers, _, done = tools.step(message)
    assert [answer["content"] for answer in answers] == [
        "42",
        "abab",
        "error: missing a required argument: 'text'",
        "42",
        "there is no tool phone; there is: calculator, repeat",
    ]
    assert not done and tools.step({"content": "it is 42", "tool_calls": []}) == ([], 0.0, True)


@pytest.mark.parametrize(
    "content", ["[]", "{}", "[1]", '[{"type": "function"}]', "[", '[{"type": "x", "function": {"name": "a"}}]']
)
def test_schemas_of_tools_are_checked(content: str, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(content)
    with pytest.raises(ConfigError, match=r"environment\.tools=.*tools\.json is (not JSON|not of the form)"):
        read_tools(f"{tmp_path}/tools.json")


def test_search_ranks_by_bm25(tmp_path: Path) -> None:
    documents = ["the cat sat on the mat", "the dog ate the cat food", "a bird sang", "cat cat cat"]
    # By the formula: idf(cat) = ln(1 + 1.5/3.5), idf(food) = ln(1 + 3.5/1.5); lengths 6, 6, 3, 3 of mean 4.5.
    assert Index(documents).search("cat food", 3) == [documents[1], documents[3], documents[0]]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    tools = Tools(["search"], corpus=str(corpus), results=1)
    assert tools.step("<tool>search who sang?</tool>")[0] == [{"role": "tool", "content": "a bird sang"}]
    assert tools.step("<tool>search zebra</tool>")[0] == [{"role": "tool", "content": "nothing was found"}]


def test_python_runs_in_the_sandbox() -> None:
    tools = Tools(["python"], isolation="rlimits")
    [found] = tools.step("<tool>python\nprint(sum(range(10)))\nraise ValueError('over')</tool>")[0]
    assert found["content"] == "45\nValueError: over"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tools": ["abacus"]}, "'abacus' is not a tool; use calculator, python, search"),
        ({"tools": ["search"]}, "needs a corpus; set environment.options.corpus"),
        ({"tools": ["search"], "corpus": "none.txt"}, "environment.options.corpus=none.txt cannot be read"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        Tools(**options)  # type: ignore[arg-type]
    assert problem in str(error.value)
