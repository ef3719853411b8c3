"""Convert data sets of other formats to train.parquet and eval.parquet: validated, without duplicates, split by hash.

The rows depend on the kind of training: ``rl`` {data_source, prompt, ability, reward_model, extra_info}, ``sft`` {prompt, response}
and ``preference`` {prompt, chosen, rejected}. Prompts are lists of {role, content}; responses are texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.commands.prepare_data.recipes import (
    RECIPES,
    Message,
    PlacedRow,
    PreparedExample,
    RowError,
    recognise,
)
from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.data.rendering import Renderer
from rlhf_mcore.data.tokenizer import token_ids
from rlhf_mcore.foreign import read_bytes
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.readers.data_rows import BAD_CHARACTERS, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS = ("rl", "sft", "preference")
NEEDED = {"rl": (), "sft": ("response",), "preference": ("chosen", "rejected")}
KEYS = {
    "rl": "data.prompt_key and data.answer_key",
    "sft": "data.prompt_key and data.response_key",
    "preference": "data.prompt_key, data.chosen_key and data.rejected_key",
}
TASK_FILES = ("task.toml", "task.yaml")  # a directory with such a file is a task for an agent in a container
KINDS = (".parquet", ".jsonl", ".json")
MAX_JSON_BYTES = 512 * 2**20  # limit for a file with one JSON value, which takes ten times its size in memory
SHOWN = 5  # number of bad rows in a message


@dataclass(slots=True)
class Options:
    """Options for the preparation of data."""

    task: str = "rl"  # rl | sft | preference
    format: str = "auto"  # a recipe, or auto: by the first row
    system: str | None = None  # system message for prompts without one
    eval_share: float = 0.02  # share of held-out prompts, which are chosen by a hash of their text
    max_prompt_tokens: int | None = None
    max_response_tokens: int | None = None
    skip_bad: bool = False  # skip and count unusable rows instead of raising an error
    lang: str | None = None  # OpenAssistant: only this language


@dataclass(slots=True)
class PreparationReport:
    """Counts of used and skipped rows."""

    counts: Counter[str] = field(default_factory=Counter)  # in order: read, unusable, incomplete, duplicates, ...
    sources: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [f"{count:>9,}  {name}" for name, count in self.counts.items()]
        lines += [f"           {count:,} from {name}" for name, count in sorted(self.sources.items())]
        lines += [f"           unusable: {problem}" for problem in self.bad[:SHOWN]]
        if self.prompt_tokens:
            ordered = sorted(self.prompt_tokens)
            figures = (ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100], ordered[-1])
            lines.append("           prompt tokens: median {}, 95 % {}, longest {}".format(*figures))
        return lines


def prepare(
    rows: Iterable[PlacedRow], options: Options, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[dict[str, list[dict[str, Any]]], PreparationReport]:
    """Return the prepared rows ({"train": [...], "eval": [...]}), and a report of the used and skipped rows.

    Raises:
        ConfigError: rows are unusable (the message names their places), the format is unknown, or no row is left.
    """
    report = PreparationReport()
    examples = _usable(rows, options, report)
    examples = _distinct(examples, options, report)
    if tokenizer is not None:
        examples = _short_enough(examples, options, tokenizer, report)
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "eval": []}
    for example in examples:
        # A number in [0, 1) that depends only on the prompt, so that all rows of a prompt are in the same split.
        share = int(prompt_key(example), 16) / 2**64
        split = "eval" if share < options.eval_share else "train"
        splits[split].append(_row(example, options.task, split))
        report.sources[example.data_source] += 1
    for split, kept in splits.items():
        report.counts[f"in {split}"] = len(kept)
    if not any(splits.values()):
        raise ConfigError("no usable row is left:\n" + "\n".join(report.lines()))
    return splits, report


def _usable(rows: Iterable[PlacedRow], options: Options, report: PreparationReport) -> list[PreparedExample]:
    usable: list[PreparedExample] = []
    report.counts.update(dict.fromkeys(("rows read", "unusable", "without what the task needs"), 0))
    for example in _recipe_output(rows, options, report):
        if isinstance(example, RowError):
            report.bad.append(str(example))
        elif problem := _problem(example):
            report.bad.append(problem)
        elif not _fits_task(example, options):
            report.counts["without what the task needs"] += 1
        else:
            if options.system and isinstance(example.prompt, str):
                raise ConfigError(
                    f"--system: the prompt of {example.place} is already rendered text; leave --system out"
                )
            if options.system and _turns(example.prompt)[0][0] != "system":
                example.prompt = [{"role": "system", "content": options.system}, *example.prompt]
            usable.append(example)
    report.counts["unusable"] = len(report.bad)
    if report.bad and not options.skip_bad:
        listed = join_first(report.bad, SHOWN, "\n  ")
        raise ConfigError(
            f"{len(report.bad)} rows cannot be used:\n  {listed}\nCorrect them, or skip them with --skip-bad"
        )
    return usable


def _recipe_output(
    rows: Iterable[PlacedRow], options: Options, report: PreparationReport
) -> Iterator[PreparedExample | RowError]:
    def count_rows() -> Iterator[PlacedRow]:
        for placed in rows:
            report.counts["rows read"] += 1
            yield placed

    stream = count_rows()
    first = next(stream, None)
    if first is None:
        raise ConfigError("the data has no rows")
    name = recognise(first[1]) if options.format == "auto" else options.format
    if name is None:
        columns = ", ".join(sorted(first[1]))
        raise ConfigError(
            f"{first[0]}: rows with the columns {columns} have no known format; choose one with --format: {', '.join(RECIPES)}. A "
            f"parquet or jsonl file with other columns needs no preparation; name the columns with {KEYS[options.task]}"
        )
    return RECIPES[name](chain([first], stream))


def _problem(example: PreparedExample) -> str | None:
    texts = [text for _, text in _turns(example.prompt)]
    if not any(text.strip() for text in texts):
        return f"{example.place}: the prompt is empty"
    if not isinstance(example.prompt, str) and example.prompt[-1]["role"] != "user":
        return f"{example.place}: the prompt does not end with a user message"
    answers = (example.ground_truth, example.response, example.chosen, example.rejected)
    for text in (*texts, *(answer for answer in answers if answer is not None)):
        if bad := BAD_CHARACTERS.search(text):
            return f"{example.place}: character U+{ord(bad.group()):04X} in {text[:40]!r}"
    return None


def _fits_task(example: PreparedExample, options: Options) -> bool:
    if options.lang is not None and example.extra.get("lang", options.lang) != options.lang:
        return False
    return all(getattr(example, name) for name in NEEDED[options.task])


def _turns(prompt: list[Message] | str) -> list[tuple[str, str]]:
    """Return (role, text) for each message of a prompt; the role of a plain text is ""."""
    return [("", prompt)] if isinstance(prompt, str) else [(turn["role"], turn["content"]) for turn in prompt]


def prompt_key(example: PreparedExample) -> str:
    """Return a hash of a prompt that depends on roles and words, but not on spacing and case."""
    turns = [[role, " ".join(text.split()).casefold()] for role, text in _turns(example.prompt)]
    return blake2b(json.dumps(turns).encode(), digest_size=8).hexdigest()


def _distinct(
    examples: Sequence[PreparedExample], options: Options, report: PreparationReport
) -> list[PreparedExample]:
    """Return the examples without duplicates. Prompts with different ground truths are skipped, because they contradict each other."""
    keys = [prompt_key(example) for example in examples]
    truths: dict[str, set[str]] = {}
    for key, example in zip(keys, examples, strict=True):
        if options.task == "rl" and example.ground_truth is not None:
            truths.setdefault(key, set()).add(example.ground_truth)
    agreeing = [(k, example) for k, example in zip(keys, examples, strict=True) if len(truths.get(k, ())) <= 1]
    kept: dict[tuple[str, ...], PreparedExample] = {}
    for key, example in agreeing:
        kept.setdefault((key, *(getattr(example, name) for name in NEEDED[options.task])), example)
    report.counts["duplicates"] = len(agreeing) - len(kept)
    report.counts["with contradicting answers"] = len(examples) - len(agreeing)
    return list(kept.values())


def _short_enough(
    examples: Sequence[PreparedExample], options: Options, tokenizer: PreTrainedTokenizerBase, report: PreparationReport
) -> list[PreparedExample]:
    kept = []
    lengths = _num_tokens([example.prompt for example in examples], tokenizer)
    for example, length in zip(examples, lengths, strict=True):
        answers = [getattr(example, name) for name in NEEDED[options.task]]
        longest = max(map(len, token_ids(tokenizer, answers)), default=0)
        if length <= (options.max_prompt_tokens or length) and longest <= (options.max_response_tokens or longest):
            kept.append(example)
            report.prompt_tokens.append(length)
    report.counts["too long"] = len(examples) - len(kept)
    return kept


def _num_tokens(prompts: Sequence[list[Message] | str], tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    """Yield the number of tokens of each prompt, rendered with the tokenizer's chat template if it has one."""
    if tokenizer.chat_template is None:
        texts: Iterator[str] = ("\n".join(text for _, text in _turns(prompt)) for prompt in prompts)
    else:
        texts = Renderer(tokenizer, "auto").all([(prompt, f"prompt {n}") for n, prompt in enumerate(prompts, start=1)])
    return (len(token_ids(tokenizer, [text])[0]) for text in texts)


def _row(example: PreparedExample, task: str, split: str) -> dict[str, Any]:
    row: dict[str, Any] = {"data_source": example.data_source, "prompt": example.prompt}
    if task != "rl":
        return row | {name: getattr(example, name) for name in NEEDED[task]}
    style = "rule" if example.ground_truth is not None else "model"
    return row | {
        "ability": example.ability,
        "reward_model": {"style": style, "ground_truth": example.ground_truth},
        "extra_info": {**example.extra, "id": f"{example.data_source}-{prompt_key(example)}", "split": split},
    }


def write_splits(splits: dict[str, list[dict[str, Any]]], directory: Path) -> list[Path]:
    """Write ``<split>.parquet`` for every split with rows, each atomically. Returns the paths."""
    import pyarrow
    from pyarrow import parquet

    directory.mkdir(parents=True, exist_ok=True)
    paths = {directory / f"{split}.parquet": rows for split, rows in splits.items() if rows}
    for path, rows in paths.items():
        temporary = path.with_name(f".{path.name}.tmp")
        parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)
        temporary.replace(path)
    return list(paths)


# ------------------------------------------------------------------------------------------------------------- reading
def read_source(source: str, *, subset: str | None = None, split: str = "train") -> Iterator[PlacedRow]:
    """Yield the rows of a file, of all data files or tasks under a directory, or of a data set on the Hub (needs ``datasets``).

    Raises:
        ConfigError: the source does not exist, or a file is malformed (the message names the line).
    """
    path = Path(source)
    if path.is_dir() and any(next(path.rglob(name), None) for name in TASK_FILES):
        folder_rows = load_plugin("container_extras", "folder_rows", f"prepare-data {source}", package="containers")
        yield from folder_rows(path)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in KINDS)
        if not files:
            raise ConfigError(f"{source}: no {', '.join(KINDS)} file in this directory")
        for file in files:
            yield from _read_file(file)
    elif path.is_file():
        yield from _read_file(path)
    else:
        yield from _read_hub(source, subset, split)


def _read_file(file: Path) -> Iterator[PlacedRow]:
    if file.suffix != ".json":
        yield from read_rows(file)
        return
    try:
        content = json.loads(
            read_bytes(file, limit=MAX_JSON_BYTES, remedy="write it as a .jsonl file").decode("utf-8-sig")
        )
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error}); JSON lines belong in a .jsonl file") from error
    for number, row in enumerate(content if isinstance(content, list) else [content]):
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, item {number}: expected a JSON object, found {type(row).__name__}")
        yield f"{file}, item {number}", row


def _read_hub(source: str, subset: str | None, split: str) -> Iterator[PlacedRow]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"{source}: no such file or directory. If it is the Hub id of a data set, `pip install datasets`, or download its "
            "files and give their paths"
        ) from error
    try:
        rows = load_dataset(source, subset, split=split)
    except Exception as error:
        raise ConfigError(f"{source}: the data set could not be loaded ({type(error).__name__}: {error})") from error
    for number, row in enumerate(rows):
        yield f"{source} ({split}), row {number}", dict(row)
