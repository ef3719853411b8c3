"""Files of given responses -> tokenised examples, for supervised fine-tuning and for reward models.

Tokens are those of a rollout: the prompt as ``load_prompts`` renders it, then the response as the policy would have to generate it,
its text and the end-of-sequence token. So what is learned here is what is generated and scored later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.supervised import MESSAGES
from rlhf_mcore.data.collate import Row, make_train_batch
from rlhf_mcore.data.readers import read_rows, require_column
from rlhf_mcore.data.source import check_characters, render
from rlhf_mcore.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXAMPLES_PER_TOKENIZER_CALL = 512


@dataclass(slots=True)
class Example:
    """A prompt and the responses to learn from: one, or the chosen and the rejected one."""

    place: str
    prompt_ids: list[int]
    response_ids: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """Of the longest row."""
        return len(self.prompt_ids) + max(map(len, self.response_ids))


@dataclass(slots=True)
class _Texts:
    place: str
    prompt: str
    responses: list[str]


def load_examples(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    columns: Mapping[str, str],
    *,
    max_tokens: int,
    drop_longer: bool,
    field: str = "data.train",
) -> list[Example]:
    """All examples of ``files`` in order.

    Args:
        columns: of the prompt and of its responses, in this order, by the config keys that name them. A file of single
            responses may have a column "messages" instead, of which the last message is the response.
        max_tokens: of prompt and response together.
        drop_longer: leave longer examples out instead of refusing them.
        field: the config key that names the files, for messages.

    Raises:
        ConfigError: for anything wrong with a file or a row, naming both, and when no example is left.
    """
    texts = [_texts(row, tokenizer, columns, place) for file in files for place, row in read_rows(Path(file))]
    examples = list(_tokenized(texts, tokenizer))
    longer = [example for example in examples if example.num_tokens > max_tokens]
    if longer and not drop_longer:
        longest = max(example.num_tokens for example in longer)
        raise ConfigError(
            f"{field}: {len(longer)} of {len(examples)} examples are longer than {max_tokens} tokens, the longest has {longest}; the "
            f"first is {longer[0].place}. The limit is data.max_tokens, the room of a microbatch "
            "(trainer.max_tokens_per_microbatch) or the positions of the model: raise it, or set data.overlong_prompts=drop"
        )
    kept = [example for example in examples if example.num_tokens <= max_tokens]
    if not kept:
        raise ConfigError(
            f"{field}: all {len(examples)} examples are longer than {max_tokens} tokens; raise data.max_tokens"
        )
    return kept


def example_batch(examples: Sequence[Example], pad_token_id: int) -> TrainBatch:
    """The rows of the examples one after the other; ``group_ids`` say which example each belongs to."""
    rows = [
        Row(example.prompt_ids, response_ids, [0.0] * len(response_ids), 0.0)
        for example in examples
        for response_ids in example.response_ids
    ]
    group_ids = [place for place, example in enumerate(examples) for _ in example.response_ids]
    return make_train_batch(rows, group_ids, pad_token_id)


class Sampler(Protocol):
    """Positions of the examples of the next step."""

    def next_batch(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class ExampleBatches:
    """Examples in the order of a sampler."""

    examples: Sequence[Example]
    sampler: Sampler
    pad_token_id: int

    def next_batch(self) -> TrainBatch:
        """The rows of the next step, the same on every rank."""
        return example_batch([self.examples[place] for place in self.sampler.next_batch()], self.pad_token_id)


def _texts(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, str], place: str) -> _Texts:
    (prompt_key, prompt_column), *responses = columns.items()
    if len(responses) == 1 and MESSAGES in row and responses[0][1] not in row:
        prompt, answers = _split(row[MESSAGES], f"{place}, column {MESSAGES!r}")
    else:
        prompt = require_column(row, prompt_column, place, setting=prompt_key)
        answers = {column: require_column(row, column, place, setting=key) for key, column in responses}
    for column, text in answers.items():
        _check_response(text, f"{place}, column {column!r}")
    return _Texts(place, render(prompt, tokenizer, f"{place}, prompt"), list(answers.values()))


def _split(messages: Any, place: str) -> tuple[list[Any], dict[str, Any]]:
    """A conversation up to its last message, and this one."""
    if not isinstance(messages, list) or len(messages) < 2 or not isinstance(messages[-1], dict):
        raise ConfigError(f"{place}: expected a list of two or more {{role, content}}, found {messages!r:.80}")
    last = messages[-1]
    if last.get("role") != "assistant":
        raise ConfigError(
            f"{place}: the last message has to be the assistant's, which is learned; found role {last.get('role')!r}"
        )
    return messages[:-1], {MESSAGES: last.get("content")}


def _check_response(text: Any, place: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{place}: a response is a text that is not empty, found {text!r:.60}; tools/prepare_data.py converts other shapes"
        )
    check_characters(text, place)


def _tokenized(texts: Sequence[_Texts], tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
    for start in range(0, len(texts), EXAMPLES_PER_TOKENIZER_CALL):
        part = texts[start : start + EXAMPLES_PER_TOKENIZER_CALL]
        flat = [text for item in part for text in (item.prompt, *item.responses)]
        encoded = iter(tokenizer(flat, add_special_tokens=False)["input_ids"])
        for item in part:
            prompt_ids = list(next(encoded))
            if not prompt_ids:
                raise ConfigError(f"{item.place}: the prompt {item.prompt!r:.60} has no tokens; remove the row")
            responses = [_ended(next(encoded), int(tokenizer.eos_token_id)) for _ in item.responses]
            yield Example(item.place, prompt_ids, responses)


def _ended(response_ids: Sequence[int], eos_token_id: int) -> list[int]:
    ended = bool(response_ids) and response_ids[-1] == eos_token_id
    return [*response_ids] if ended else [*response_ids, eos_token_id]
