from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data.examples import ExampleBatches, TokenizedExample, example_batch, load_examples
from rlhf_mcore.data.source import load_prompts
from tests.episodes import make_example
from tests.unit.data.test_source import CHAT, write_jsonl, write_parquet

SFT = {"data.prompt_key": "prompt", "data.response_key": "response"}
AS_IT_IS = DataConfig(apply_chat_template="false")
PAIRS = {"data.prompt_key": "prompt", "data.chosen_key": "chosen", "data.rejected_key": "rejected"}
EOS = 1


def read(
    tokenizer: PreTrainedTokenizerBase, file: str, columns: dict[str, str] = SFT, max_tokens: int = 100, **options: Any
) -> list[TokenizedExample]:
    return load_examples([file], tokenizer, columns, max_tokens=max_tokens, **{"drop_longer": False, **options})


def text(tokenizer: PreTrainedTokenizerBase, ids: NDArray[np.int32]) -> str:
    assert ids.dtype == np.int32
    return "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


@pytest.mark.parametrize("write, name", [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
def test_a_prompt_of_messages_is_that_of_a_rollout_and_the_response_ends(
    write: Any, name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = write(tmp_path / name, {"prompt": CHAT, "response": "2"})
    (example,) = read(tokenizer, file)
    assert text(tokenizer, example.prompt_ids) == "[u]1+1=\n[a]"
    assert example.prompt_ids.tolist() == load_prompts([file], tokenizer, DataConfig())[0].prompt_ids
    assert [text(tokenizer, ids) for ids in example.response_ids] == ["2<eos>"]


def test_a_prompt_that_is_a_text_can_be_used_as_it_is(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": "1+1=", "response": "2"})
    (example,) = read(tokenizer, file, data=AS_IT_IS)
    assert (text(tokenizer, example.prompt_ids), example.response_ids[0][-1]) == ("1+1=", EOS)


def test_a_conversation_is_learned_from_its_last_message(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [*CHAT, {"role": "assistant", "content": "2"}, {"role": "user", "content": "+1="}]
    row = {"messages": [*turns, {"role": "assistant", "content": "3"}]}
    (example,) = read(tokenizer, write_parquet(tmp_path / "a.parquet", row))
    assert text(tokenizer, example.prompt_ids) == "[u]1+1=\n[a]2\n[u]+1=\n[a]"
    assert text(tokenizer, example.response_ids[0]) == "3<eos>"


def test_a_pair_shares_its_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"prompt": CHAT, "chosen": "2", "rejected": "three"})
    (example,) = read(tokenizer, file, PAIRS)
    assert [text(tokenizer, ids) for ids in example.response_ids] == ["2<eos>", "three<eos>"]
    assert example.num_tokens == len("[u]1+1=\n[a]") + len("three") + 1


def test_other_columns(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"q": "a", "r": "b", "messages": [], "prompt": "x"})
    (example,) = read(tokenizer, file, {"data.prompt_key": "q", "data.response_key": "r"}, data=AS_IT_IS)
    assert (text(tokenizer, example.prompt_ids), text(tokenizer, example.response_ids[0])) == ("a", "b<eos>")


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        ({"prompt": "a"}, SFT, ["no column 'response'", "there are: prompt", "data.response_key"]),
        ({"prompt": "a", "chosen": "b"}, PAIRS, ["no column 'rejected'", "data.rejected_key"]),
        ({"prompt": "a", "response": " "}, SFT, ["column 'response'", "not empty", "' '"]),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, PAIRS, ["column 'chosen'", "rlhf-mcore prepare-data"]),
        ({"prompt": "a", "response": "b\x00"}, SFT, ["column 'response'", "NUL"]),
        ({"prompt": " ", "response": "b"}, SFT, ["prompt", "empty"]),
        ({"messages": [*CHAT, {"role": "user", "content": "x"}]}, SFT, ["last message", "assistant", "'user'"]),
        ({"messages": [{"role": "assistant", "content": "x"}]}, SFT, ["two or more"]),
        ({"messages": [*CHAT, {"role": "assistant", "content": ""}]}, SFT, ["'messages'", "not empty"]),
        ({"messages": "x"}, SFT, ["'messages'", "list"]),
    ],
)
def test_bad_rows_are_refused_with_their_line(
    row: Any, columns: dict[str, str], words: list[str], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ConfigError) as error:
        read(tokenizer, write_jsonl(tmp_path / "bad.jsonl", row), columns)
    assert all(word in str(error.value) for word in ["bad.jsonl, line 1", *words]), error.value


def test_long_examples_are_counted_or_dropped(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = write_jsonl(
        tmp_path / "a.jsonl", *[{"prompt": "p", "chosen": "c", "rejected": "r" * count} for count in (4, 5, 3, 9)]
    )
    with pytest.raises(
        ConfigError, match=r"data\.eval: 2 of 4 .* than 6 tokens, the longest has 11; .*line 2"
    ) as error:
        read(tokenizer, file, PAIRS, max_tokens=6, field="data.eval", data=AS_IT_IS)
    assert "data.max_tokens" in str(error.value) and "data.overlong_prompts=drop" in str(error.value)
    kept = read(tokenizer, file, PAIRS, max_tokens=6, drop_longer=True, data=AS_IT_IS)
    assert [example.num_tokens for example in kept] == [6, 5]
    with pytest.raises(ConfigError, match="all 4 examples"):
        read(tokenizer, file, PAIRS, max_tokens=2, drop_longer=True)


def test_pairs_of_equal_responses_are_left_out_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    same, other = ({"prompt": "1+1=", "chosen": "2", "rejected": rejected} for rejected in ("2", "3"))
    notes: list[str] = []
    (example,) = read(tokenizer, write_jsonl(tmp_path / "a.jsonl", other, same), PAIRS, note=notes.append)
    assert [text(tokenizer, ids) for ids in example.response_ids] == ["2<eos>", "3<eos>"]
    assert "1 of 2 pairs have equal responses and are dropped" in notes[0] and "a.jsonl, line 2" in notes[0]
    with pytest.raises(ConfigError, match=r"data\.train: .*equal in all 2 pairs"):
        read(tokenizer, write_jsonl(tmp_path / "b.jsonl", same, same), PAIRS)


@pytest.mark.usefixtures("world")
def test_rows_of_a_batch_follow_each_other_by_example() -> None:
    batch = example_batch([make_example([5, 6], [7], [8, 9]), make_example([4], [3, 2], [1])])
    assert batch.token_ids.tolist() == [5, 6, 7, 5, 6, 8, 9, 4, 3, 2, 4, 1]
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1]
    assert batch.lengths.tolist() == [3, 4, 3, 2] and batch.num_sampled.tolist() == [1, 2, 2, 1]
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.rows.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_keeps_the_tokens_of_the_rows_that_it_owns(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    # Lengths 4, 3, 2, 6: dealt 6, 4, 3 to ranks 0, 1, 2, and then 2 to rank 2.
    sizes = [4, 3, 2, 6]
    batch = example_batch([make_example([10 * k], [10 * k + t for t in range(1, n)]) for k, n in enumerate(sizes)])
    assert batch.owners.tolist() == [1, 2, 2, 0] and batch.lengths.tolist() == sizes
    rows = {0: [3], 1: [0], 2: [1, 2]}[rank]
    assert batch.rows.tolist() == rows
    assert batch.token_ids.tolist() == [10 * k + t for k in rows for t in range(sizes[k])]


@pytest.mark.usefixtures("world")
def test_batches_follow_the_sampler() -> None:
    class Backwards:
        def next_batch(self) -> list[int]:
            return [2, 0]

    examples = [make_example([1, k], [9]) for k in range(3)]
    assert ExampleBatches(examples, Backwards()).next_batch(1)[0].token_ids.tolist() == [1, 2, 9, 1, 0, 9]
