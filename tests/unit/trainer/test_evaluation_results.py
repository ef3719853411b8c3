from __future__ import annotations

import json

import pytest

from rlhf_mcore.trainer.evaluation_results import comparison, comparison_table, results, results_table, sources_table
from rlhf_mcore.trainer.statistics import Graded


def rows(right: str, source_of: str = "aabb") -> list[Graded]:
    """Make a response per prompt. ``right`` has a 1 for each correct response."""
    return [
        Graded(f"p{i}", i, source, 0, float(mark), mark == "1", "", i + 1, i == 3)
        for i, (mark, source) in enumerate(zip(right, source_of, strict=True))
    ]


def test_results_by_source() -> None:
    content = results("here", {"seed": 1}, rows("1100"), seed=0)
    assert content["checkpoint"] == "here" and content["settings"] == {"seed": 1}
    assert list(content["results"]) == ["all", "source: a", "source: b"]
    assert content["results"]["all"]["accuracy"]["value"] == 0.5
    # Wilson's interval of 2 of 2: from 1 / (1 + z^2 / 2).
    expected = {"value": 1.0, "low": pytest.approx(1 / (1 + 1.959964**2 / 2)), "high": 1.0}
    assert content["results"]["source: a"]["accuracy"] == expected
    assert content["results"]["source: b"]["truncated_fraction"]["value"] == 0.5
    assert content["results"]["all"]["response_length_max"] == 4
    assert (content["results"]["all"]["num_prompts"], content["results"]["all"]["num_responses"]) == (4, 4)
    assert "bootstrap" in content["methods"]["interval"]
    assert json.loads(json.dumps(content)) == content


def test_one_source_is_not_repeated() -> None:
    content = results("here", {}, rows("1100", "aaaa"), seed=0)
    assert list(content["results"]) == ["all"]
    assert sources_table(content)[1] == []


def test_tables() -> None:
    content = results("here", {}, rows("1100"), seed=0)
    figures = {row[0]: row[1:] for row in results_table(content)[1]}
    assert figures["accuracy"] == ("0.5000", "0.1500 to 0.8500")
    assert figures["num prompts"] == ("4", "")
    assert [row[:3] for row in sources_table(content)[1]] == [("a", "2", "1.0000"), ("b", "2", "0.0000")]


def test_a_comparison_says_how_it_was_made() -> None:
    content = comparison(("old", "new"), rows("1100"), rows("1111"), seed=0)
    assert (content["baseline"], content["evaluated"], content["num_prompts"]) == ("old", "new", 4)
    accuracy = content["accuracy"]
    assert (accuracy["baseline"], accuracy["evaluated"], accuracy["difference"]["value"]) == (0.5, 1.0, 0.5)
    assert (accuracy["wins"], accuracy["losses"], accuracy["ties"], accuracy["sign_test_p"]) == (2, 0, 2, 0.5)
    assert "paired" in content["methods"]["interval"] and "sign test" in content["methods"]["sign_test_p"]
    header, table = comparison_table(content)
    assert header == ("", "accuracy", "reward")
    assert [row[0] for row in table][:3] == ["old", "new", "difference"]
    assert [row[1] for row in table] == ["0.5000", "1.0000", "+0.5000", "+0.0000 to +1.0000", "2 / 0 / 2", "0.5"]


def test_only_prompts_that_both_have_are_compared() -> None:
    content = comparison(("old", "new"), rows("1100")[:3], rows("0111")[1:], seed=0)
    assert (content["num_prompts"], content["num_prompts_not_shared"]) == (2, 2)
    assert content["accuracy"]["difference"]["value"] == 0.5


def test_nothing_to_compare() -> None:
    content = comparison(("old", "new"), rows("1100")[:1], rows("1100")[1:], seed=0)
    assert content["num_prompts"] == 0 and comparison_table(content)[1] == []
