"""Tokenise on several ranks with the result of one process. Every rank reports an error of any rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data import shared_tokens
from rlhf_mcore.data.examples import load_examples
from rlhf_mcore.data.source import load_prompts
from tests.unit.parallel.world import ThreadGroup, rank_threads, run_ranks

__all__ = ["rank_threads"]
pytestmark = pytest.mark.usefixtures("rank_threads")

T = TypeVar("T")
COLUMNS = {"data.prompt_key": "prompt", "data.response_key": "response"}


@pytest.fixture(autouse=True)
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tokens, "TEXTS_PER_CALL", 3)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Write prompts as strings and as messages. Two strings are longer than 12 tokens."""
    prompts: list[Any] = [f"{n}+{n}={'?' * 20 * (n in (5, 13))}" for n in range(20)]
    prompts[7] = [{"role": "user", "content": "7+7="}]
    return write(tmp_path / "a.jsonl", prompts)


def write(path: Path, prompts: list[Any]) -> str:
    path.write_text("".join(json.dumps({"prompt": text, "response": f"r{n}"}) + "\n" for n, text in enumerate(prompts)))
    return str(path)


def of_ranks(size: int, load: Callable[[ThreadGroup], T]) -> list[T | str]:
    """Return each rank's result or error."""

    def body(group: ThreadGroup) -> T | str:
        try:
            return load(group)
        except ConfigError as error:
            return str(error)

    return run_ranks(size, body)


# 20 rows take 7 calls: in rounds of 3 calls, and with a rank without calls.
@pytest.mark.parametrize("size", [3, pytest.param(8, marks=pytest.mark.full)])
def test_prompts_are_those_of_a_process_alone(size: int, file: str, tokenizer: PreTrainedTokenizerBase) -> None:
    cfg = DataConfig(max_prompt_tokens=15, overlong_prompts="drop")
    alone = load_prompts([file], tokenizer, cfg)
    assert [prompt.index for prompt in alone] == [n for n in range(20) if n not in (5, 13)]
    assert of_ranks(size, lambda group: load_prompts([file], tokenizer, cfg, group=group)) == [alone] * size


def test_each_text_is_tokenised_once(
    file: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    token_ids = shared_tokens.token_ids

    def count(tokenizer: PreTrainedTokenizerBase, given: Any) -> list[list[int]]:
        texts.extend(given)
        return token_ids(tokenizer, given)

    monkeypatch.setattr(shared_tokens, "token_ids", count)
    prompts, *_ = run_ranks(4, lambda group: load_prompts([file], tokenizer, DataConfig(), group=group))
    assert sorted(texts) == sorted(prompt.text for prompt in prompts)


@pytest.mark.parametrize("size", [3])
def test_examples_are_those_of_a_process_alone(size: int, file: str, tokenizer: PreTrainedTokenizerBase) -> None:
    def load(group: Any) -> list[Any]:
        examples = load_examples([file], tokenizer, COLUMNS, max_tokens=17, drop_longer=True, group=group)
        return [(e.place, e.prompt_ids.tolist(), [ids.tolist() for ids in e.response_ids]) for e in examples]

    assert len(alone := load(None)) == 18
    assert of_ranks(size, load) == [alone] * size


def test_every_rank_reports_the_first_bad_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = shared_tokens.token_ids

    def fail(tokenizer: PreTrainedTokenizerBase, texts: Any) -> list[list[int]]:
        if bad := [text for text in texts if "bad" in text]:
            raise ConfigError(f"cannot split {bad[0]}")
        return token_ids(tokenizer, texts)

    monkeypatch.setattr(shared_tokens, "token_ids", fail)
    file = write(tmp_path / "a.jsonl", ["good"] * 8 + ["bad 8", "bad 9"] + ["good"] * 3 + ["bad 13"])
    cfg = DataConfig(apply_chat_template="false")
    errors = of_ranks(4, lambda group: load_prompts([file], tokenizer, cfg, group=group))
    assert errors == ["cannot split bad 8"] * 4


def test_a_row_without_tokens_is_named_on_every_rank(
    file: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = shared_tokens.token_ids

    def lose(tokenizer: PreTrainedTokenizerBase, texts: Any) -> list[list[int]]:
        return [[] if "11+11" in text else ids for text, ids in zip(texts, token_ids(tokenizer, texts), strict=True)]

    monkeypatch.setattr(shared_tokens, "token_ids", lose)
    errors = of_ranks(3, lambda group: load_prompts([file], tokenizer, DataConfig(), group=group))
    assert len(set(map(str, errors))) == 1
    assert f"{file}, line 12: the prompt" in str(errors[0])


def test_a_rank_that_cannot_read_its_file_stops_all(file: str, tokenizer: PreTrainedTokenizerBase) -> None:
    def load(group: ThreadGroup) -> Any:
        return load_prompts(["missing.jsonl" if group.rank() == 1 else file], tokenizer, DataConfig(), group=group)

    errors = of_ranks(3, load)
    assert len(set(map(str, errors))) == 1
    assert "missing.jsonl" in str(errors[0])


def test_ranks_with_different_rows_are_refused(file: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    other = write(tmp_path / "b.jsonl", ["1+1="] * 20)

    def load(group: ThreadGroup) -> Any:
        return load_examples(
            [other if group.rank() == 2 else file], tokenizer, COLUMNS, max_tokens=99, drop_longer=False, group=group
        )

    errors = of_ranks(3, load)
    assert len(set(map(str, errors))) == 1
    assert "data.train" in str(errors[0]) and "rank 0" in str(errors[0]) and "rank 2" in str(errors[0])


def test_an_error_that_is_no_users_stops_all(
    file: str, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tokenizer: PreTrainedTokenizerBase, texts: Any) -> list[list[int]]:
        if any("4+4" in text for text in texts):
            raise MemoryError("no memory")
        return [[1]] * len(texts)

    monkeypatch.setattr(shared_tokens, "token_ids", fail)

    def body(group: Any) -> str:
        with pytest.raises((MemoryError, RuntimeError)) as error:
            load_prompts([file], tokenizer, DataConfig(), group=group)
        return type(error.value).__name__

    assert run_ranks(3, body) == ["RanksFailed", "MemoryError", "RanksFailed"]
