"""docs/guide/environments/rollout-functions.md and the rollout functions in examples/: they run, and score what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.rules.environment import environment_problems
from rlhf_mcore.config.rules.reward import reward_problems
from rlhf_mcore.environments.function_worker import load_rollout
from rlhf_mcore.types import Trajectory
from tests.unit.environments.conftest import DOCUMENTS, Play

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/guide/environments/rollout-functions.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """All code of a language on the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def written(episode: Trajectory, tokenizer: PreTrainedTokenizerBase, writer: str) -> list[str]:
    """The texts of a writer."""
    turns = [turn for turn in episode.turns if turn.writer == writer]
    return [str(tokenizer.decode(episode.token_ids[turn.start : turn.stop])) for turn in turns]


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function of the page."""
    monkeypatch.chdir(tmp_path)
    Path("search.py").write_text(blocks("python")[0])
    return load_rollout("search.py:rollout")


def test_the_function_of_the_page_searches(search: Any, play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    asked = "<search>capital of France</search>"
    [episode] = play(search, [f"{asked} dropped", "Paris"], new=60, max_tokens=200, max_total=300)
    assert written(episode, tokenizer, "policy") == [asked, "Paris<end>"]
    assert written(episode, tokenizer, "environment") == ["<result>Paris</result>"]
    assert episode.response_text == "Paris" and episode.score is None
    Path("run.yaml").write_text(f"base: {ROOT}/configs/base.yaml\n" + blocks("yaml")[0])
    cfg = load_config("run.yaml", ["model.path=model", "data.train=[a.jsonl]"])
    assert [*reward_problems(cfg), *environment_problems(cfg)] == []


def test_the_other_code_of_the_page_runs(play: Play) -> None:
    names: dict[str, Any] = {}
    exec("import asyncio\n" + blocks("python")[1], names)
    [episode] = play(names["best_of_two"], ["long", "no"])
    assert episode.score is not None and episode.score.value == -3 and episode.score.parts["rollout.longest"] == 5
    assert len(episode.sequences) == 2
    calls: list[dict[str, Any]] = []
    names |= {"rm": type("rm", (), {"train": staticmethod(lambda **given: calls.append(given))}), "rows": []}
    exec(blocks("python")[2].replace("import rlhf_mcore as rm", ""), names)
    assert calls[0]["rollout"] is names["best_of_two"]


def test_every_helper_is_on_the_page() -> None:
    from dataclasses import fields

    from rlhf_mcore.environments.function_worker import FunctionContext, FunctionPolicy, FunctionPrompt, FunctionTurn

    section = PAGE.partition("## Arguments")[2].partition("\n## ")[0]
    for name, kind in {"prompt": FunctionPrompt, "ctx": FunctionContext}.items():
        documented = set(re.findall(rf"`{name}\.(\w+)", section))
        assert {each for each in dir(kind) if not each.startswith("_")} == documented
    assert {each.name for each in fields(FunctionTurn)} == set(re.findall(r"`\.(\w+)`", section))
    assert "policy.LimitReached" in PAGE and FunctionPolicy.LimitReached


def test_the_example_with_a_tool_finds_documents(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    function = load_rollout(f"{ROOT}/examples/search_tool.py:rollout")
    turns = ["<search>wide the Seine</search>", "<search>x</search>", "<search>y</search>", "it is 42"]
    [episode] = play(function, turns, max_tokens=400, max_total=500, new=40)
    assert written(episode, tokenizer, "environment") == [
        f"\n<result>{document}</result>\n" for document in (DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[0])
    ]
    assert episode.response_text == "it is 42" and episode.score is None


@pytest.mark.parametrize(
    ("turns", "reward"),
    [(["41", "so 42"], 1.5), (["42", "42"], 1.0), (["42", "41"], -0.5), (["none", "4 of 1"], 0.0)],
)
def test_the_example_of_self_correction_pays_for_corrections(play: Play, turns: list[str], reward: float) -> None:
    function = load_rollout(f"{ROOT}/examples/self_correction.py:rollout")
    [episode] = play(function, turns, max_tokens=400, max_total=500)
    assert episode.score is not None and episode.score.value == reward
    assert set(episode.score.parts) == {"rollout", "rollout.first", "rollout.second"}
    assert [turn.writer for turn in episode.turns] == ["prompt", "policy", "environment", "policy"]


@pytest.mark.parametrize(
    ("turns", "reward"),
    [(["the answer", "42"], 1.0), (["the answer", "41", "42"], 0.5), (["a", "b", "c"], 0.0), (["it is 42"], 0.0)],
)
def test_the_example_of_two_players_trains_both(
    play: Play, tokenizer: PreTrainedTokenizerBase, turns: list[str], reward: float
) -> None:
    function = load_rollout(f"{ROOT}/examples/two_players.py:rollout")
    [episode] = play(function, turns, max_tokens=400, max_total=500)
    assert episode.score is not None and episode.score.value == reward
    assert written(episode, tokenizer, "policy") == [f"{turn}<end>" for turn in turns]
    described, *guessed = written(episode, tokenizer, "prompt")
    assert "Describe the word '42'" in described and all(f"\n{turns[0]}<end>" in text for text in guessed)
    assert len(episode.sequences) == (0 if len(turns) == 1 else 2)
