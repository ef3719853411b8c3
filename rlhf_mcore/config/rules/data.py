"""Rules for ``data``: check files, columns and the first rows before a process starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.questions import needs_answer
from rlhf_mcore.config.schema import Config, DataConfig
from rlhf_mcore.readers.data_rows import (
    MESSAGES,
    checked_prompt,
    chosen_columns,
    example_contents,
    file_keys,
    ground_truth,
    mapping,
    read_rows,
    require_column,
    settings_of,
    wanted_columns,
)
from rlhf_mcore.readers.hub_ids import absent_hint
from rlhf_mcore.readers.user_functions import function_problems

# Enough for all rows of ordinary files (GSM8K's 7,473 rows take 0.1 s). The ranks find problems in later rows.
SCANNED_ROWS = 50_000
SCAN_S = 1.0

Check = Callable[[dict[str, Any], str], Iterator[str]]  # takes a row and its place, yields its problems


def prompt_problems(cfg: Config) -> Iterator[str]:
    """Check the files of prompts, and the other keys of ``data``."""
    yield from _common_problems(cfg)
    weights = cfg.data.weights
    if weights is not None and len(weights) != len(cfg.data.train):
        counts = f"{len(weights)} numbers for the {len(cfg.data.train)} files of data.train"
        yield f"data.weights={weights} has {counts}; give one number per file, or null"
    for field, files in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        yield from map(FileProblem, data_problems(cfg.data, files, field, needs_answer=needs_answer(cfg)))


def data_problems(data: DataConfig, files: Sequence[str], field: str, *, needs_answer: bool) -> Iterator[str]:
    """Check that the files of ``field`` are readable, and that rows contain a prompt, and an answer if ``needs_answer``."""
    settings = settings_of(field)
    checks = [
        partial(_prompt_row_problems, columns, settings, needs_answer) for columns in file_keys(data, files, field)
    ]
    yield from list(_column_list_problems(data, files, field)) or _file_problems(data, files, field, checks)


def example_problems(cfg: Config) -> Iterator[str]:
    """Check the files of examples: a prompt and its responses, or a conversation."""
    yield from _common_problems(cfg)
    for field, files in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        responses = run_kind(cfg).response_keys
        columns = [wanted_columns(cfg.data, key, responses) for key, _ in file_keys(cfg.data, files, field)]
        checks = [partial(_example_row_problems, cfg, each) for each in columns]
        found = map(FileProblem, _file_problems(cfg.data, files, field, checks))
        yield from list(_column_list_problems(cfg.data, files, field)) or found


def check_fills_a_step(data: DataConfig, wanted: int) -> None:
    """Reject a ``data.train`` with fewer rows than prompts per step. Transforms and length limits can only drop rows.

    Raises:
        ConfigError: there are too few rows, or a file cannot be read.
    """
    rows = (row for file in data.train for row in read_rows(Path(file), data))
    num_rows = sum(1 for _ in islice(rows, wanted))
    if num_rows < wanted:
        fewer = f"data.train has {num_rows} rows, fewer than trainer.prompts_per_step={wanted}"
        raise ConfigError(f"{fewer}: a step would contain a prompt twice; lower it, or add data")


def _common_problems(cfg: Config) -> Iterator[str]:
    pixels = cfg.data.image_pixels
    if pixels is not None and not (len(pixels) == 2 and 1 <= pixels[0] <= pixels[1]):
        yield f"data.image_pixels={pixels}: give the minimum and maximum pixels of an image, as in [3136, 1003520], or null"
    if not cfg.data.train:
        yield "data.train=[] names no file; give a list of .parquet or .jsonl files"
    if cfg.evaluate.every > 0 and not cfg.data.eval:
        yield f"evaluate.every={cfg.evaluate.every} but data.eval=[]; name files in data.eval or set evaluate.every=0"
    if cfg.data.transform is not None:  # the file is parsed but not executed here
        yield from map(FileProblem, function_problems(cfg.data.transform, "data.transform"))


def _column_list_problems(data: DataConfig, files: Sequence[str], field: str) -> Iterator[str]:
    """Check that keys with a list of columns have one column per file of ``field``."""
    for setting, value in zip(settings_of(field), chosen_columns(data, field), strict=True):
        if not files or not isinstance(value, list) or len(value) == len(files):
            continue
        if field == "data.eval" and len(set(value)) == 1:
            continue  # an inherited list with equal columns fits any number of eval files
        inherited = setting.replace("eval_", "")
        is_inherited = getattr(data, setting.removeprefix("data.")) is None
        shown = f"{setting} (not set: {inherited}={value})" if is_inherited else f"{setting}={value}"
        number = "one file" if len(files) == 1 else f"{len(files)} files"
        yield f"{shown} names {len(value)} columns for the {number} of {field}; give one column per file, or a single column"


def _file_problems(data: DataConfig, files: Sequence[str], field: str, checks: Sequence[Check]) -> Iterator[str]:
    """Report the first invalid row of each file. A transform may change every row, so with one only file formats are checked."""
    deadline = time.monotonic() + SCAN_S
    for file, check in zip(files, checks, strict=True):
        if hint := absent_hint(file, is_data=True):
            yield f"{field}: {file} does not exist (looked from {Path.cwd()}){hint}"
            continue
        try:
            for place, row in islice(read_rows(Path(file), data), SCANNED_ROWS):
                problems = [] if data.transform is not None else list(check(row, place))
                yield from (f"{field}: {problem}" for problem in problems)
                if problems or time.monotonic() > deadline:
                    break
        except ConfigError as error:
            yield f"{field}: {error}"


def _prompt_row_problems(
    columns: tuple[str, str | None], settings: tuple[str, str], needs_answer: bool, row: dict[str, Any], place: str
) -> Iterator[str]:
    """Check the prompt and the answer of a row. ``settings`` are the keys that name ``columns``."""
    (prompt_key, answer_key), (prompt_setting, answer_setting) = columns, settings
    try:
        prompt = require_column(row, prompt_key, place, setting=prompt_setting)
        checked_prompt(prompt, f"{place}, column {prompt_key!r}", parts=True)
        mapping(row, "extra_info", place)
    except ConfigError as error:
        yield str(error)
    try:
        answer = ground_truth(row, answer_key, place, answer_setting)
    except ConfigError as error:
        yield str(error)
        return
    if answer is None and needs_answer:
        there = ", ".join(row) or "none"
        yield f"{place}: no answer to compare responses with; the columns are: {there}. Set {answer_setting}, or remove the row"


def _example_row_problems(cfg: Config, columns: dict[str, str], row: dict[str, Any], place: str) -> Iterator[str]:
    """Check an example. ``columns`` maps keys to the columns that they name. A conversation is allowed too."""
    absent = [key for key, column in columns.items() if column not in row]
    if absent and not (run_kind(cfg).reads_conversations and MESSAGES in row):
        named, keys = " and ".join(f"{columns[key]!r}" for key in absent), " and ".join(absent)
        there, others = ", ".join(row) or "none", f", or give a column {MESSAGES!r}" * (len(columns) == 2)
        reader = f"algorithm.kind={cfg.algorithm.kind}"
        yield f"{place}: no column {named}, which {reader} reads; the columns are: {there}. Set {keys}{others}"
        return
    try:
        _, prompt, _ = example_contents(row, columns, place)
        checked_prompt(prompt, f"{place}, prompt", parts=True)
    except ConfigError as error:
        yield str(error)
