"""What has to hold in a run that learns from given responses: ``algorithm.kind`` sft or reward_model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_mcore.config.data_files import (
    SCAN_S,
    file_keys,
    key_problems,
    read_columns,
    row_limits,
    row_problems,
    transform_problems,
)
from rlhf_mcore.config.data_rows import checked_prompt, checked_response, require_column
from rlhf_mcore.config.derive import longest_example, padded_to
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.types import ModelGeometry

MESSAGES = "messages"  # sft: in the place of prompt and response


def example_problems(cfg: Config) -> Iterator[str]:
    """Check that every file is there, is of a known kind, and has the columns of an example."""
    if not cfg.data.train:
        yield "data.train=[] names no file; give a list of .parquet or .jsonl files"
    if cfg.evaluate.every > 0 and not cfg.data.eval:
        yield f"evaluate.every={cfg.evaluate.every} but data.eval=[]; name files in data.eval or set evaluate.every=0"
    yield from map(FileProblem, transform_problems(cfg.data))
    for field, files in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        if problems := list(key_problems(cfg.data, files, field)):
            yield from problems
            continue
        deadline = time.monotonic() + SCAN_S
        for file, (prompt_key, _) in zip(files, file_keys(cfg.data, files, field), strict=True):
            yield from map(FileProblem, _file_problems(cfg, file, field, prompt_key, deadline))


def _file_problems(cfg: Config, file: str, field: str, prompt_key: str, deadline: float) -> Iterator[str]:
    limits = row_limits(cfg.data)
    try:
        columns = read_columns(Path(file), field, limits)
    except ConfigError as error:
        yield str(error)
        return
    if cfg.data.transform is not None:
        yield from row_problems(file, field, None, limits, deadline)
        return
    wanted = wanted_columns(cfg, prompt_key)
    missing = [key for key, column in wanted.items() if column not in columns]
    if missing and not (run_kind(cfg).reads_conversations and MESSAGES in columns):
        named = " and ".join(f"{wanted[key]!r}" for key in missing)
        remedy = f"Set {' and '.join(missing)}" + (f", or give a column {MESSAGES!r}" if len(wanted) == 2 else "")
        yield (
            f"{field}: {file} has no column {named}, which algorithm.kind={cfg.algorithm.kind} reads; "
            f"its columns are: {', '.join(columns) or 'none'}. {remedy}"
        )
        return

    def check(row: dict[str, Any], place: str) -> None:
        _, prompt, _ = example_contents(row, wanted, place)
        checked_prompt(prompt, f"{place}, prompt")

    yield from row_problems(file, field, check, limits, deadline)


def wanted_columns(cfg: Config, prompt_key: str) -> dict[str, str]:
    """Columns of an example, by the keys that name them: the prompt, then its responses."""
    responses = {key: getattr(cfg.data, key.removeprefix("data.")) for key in run_kind(cfg).response_keys}
    return {"data.prompt_key": prompt_key, **responses}


def example_contents(row: dict[str, Any], columns: Mapping[str, str], place: str) -> tuple[str, Any, list[str]]:
    """(place, content of the prompt, responses) of a row; ``columns`` as of ``wanted_columns``.

    Raises:
        ConfigError: a column is missing, or a response is no text.
    """
    (prompt_key, prompt_column), *responses = columns.items()
    if len(responses) == 1 and MESSAGES in row and responses[0][1] not in row:
        prompt, answers = _split(row[MESSAGES], f"{place}, column {MESSAGES!r}")
    else:
        prompt = require_column(row, prompt_column, place, setting=prompt_key)
        answers = {column: require_column(row, column, place, setting=key) for key, column in responses}
    return place, prompt, [checked_response(text, f"{place}, column {column!r}") for column, text in answers.items()]


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


def step_problems(cfg: Config) -> Iterator[str]:
    """Whether a step is one update, and a microbatch has room for an example."""
    trainer, kind = cfg.trainer, run_kind(cfg)
    if trainer.minibatch_size not in (None, trainer.prompts_per_step):
        yield (
            f"trainer.minibatch_size={trainer.minibatch_size}: with algorithm.kind={kind.name} a step is one update, of "
            f"trainer.prompts_per_step={trainer.prompts_per_step} examples; set it to null"
        )
    if trainer.ppo_epochs != 1:
        yield f"trainer.ppo_epochs={trainer.ppo_epochs}: with algorithm.kind={kind.name} examples are not repeated; set it to 1"
    multiple = padded_to(cfg.actor.layout)
    needed = -(-longest_example(cfg) // multiple) * multiple * kind.rows_per_example
    if trainer.max_tokens_per_microbatch < max(needed, 2):
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} has no room for "
            f"{kind.rows_per_example} rows of data.max_tokens={longest_example(cfg)}; raise it to {max(needed, 2)} or more"
        )


def length_problems(cfg: Config, shape: ModelGeometry) -> Iterator[str]:
    """Whether the model has positions for the longest example. Without data.max_tokens that is found out when data are read."""
    longest = cfg.data.max_tokens
    if longest is not None and longest > shape.max_positions:
        yield (
            f"data.max_tokens={longest} exceeds max_position_embeddings={shape.max_positions} of model.path; lower it"
        )
