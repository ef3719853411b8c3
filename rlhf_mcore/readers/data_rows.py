"""Read rows of parquet and jsonl files. Limits are checked before memory is allocated, and errors name file and line.

Checks that need no tokenizer are here too, so that mistakes are reported before any process starts.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.config.schema.run import BYTES_PER_ROW
from rlhf_mcore.foreign import open_file

MESSAGES = "messages"  # column of conversations, which can replace prompt and response
ROWS_PER_READ = 1024
BYTES_PER_CONVERSION = 64 * 2**20
_LONGEST_LINE = 2**26  # bytes per read when lines are counted
# NUL ends a string in C code of tokenizers and graders. A lone surrogate cannot be encoded as UTF-8.
BAD_CHARACTERS = re.compile("[\x00\ud800-\udfff]")


def read_rows(path: Path, limits: DataConfig | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for every row of a file. ``place`` is for error messages ("train.jsonl, line 7").

    Only the limits of ``limits`` are read, such as ``max_bytes``: every rank keeps all rows in memory.

    Rows contain JSON values. In parquet files, dates, times and decimals become texts, and durations numbers.

    Raises:
        ConfigError: the file is missing, of an unknown kind, malformed or beyond the limits, or has duplicate columns or no rows.
    """
    limits = limits or DataConfig()
    open_file(path, where=f"data file {path}", remedy="name a .parquet or .jsonl file").close()
    reader = {".parquet": _read_parquet, ".jsonl": _read_jsonl}.get(path.suffix)
    if reader is None:
        raise ConfigError(f"data file {path}: unknown kind {path.suffix!r}; convert it to .parquet or .jsonl")
    num_rows = 0
    try:
        for place, row in reader(path, limits):
            num_rows += 1
            if num_rows > limits.max_rows:
                raise _too_many_rows(f"data file {path}", limits)
            yield place, row
    except OSError as error:
        raise ConfigError(f"data file {path}: cannot be read ({error})") from error
    if num_rows == 0:
        raise ConfigError(f"data file {path}: it has no rows; remove it from data.train or data.eval")


def count_rows(files: Sequence[str]) -> int | None:
    """Return the number of rows of all files, without parsing rows.

    Return None if a file is missing or malformed. Other checks report it.
    """
    try:
        return sum(map(_count, map(Path, files)))
    except (OSError, ValueError):  # ValueError: not a regular file, or not parquet
        return None


def _count(path: Path) -> int:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return int(parquet.read_metadata(path).num_rows)
    with io.BufferedReader(open_file(path), 2**20) as file:  # type: ignore[type-var]
        return sum(1 for line in iter(lambda: file.readline(_LONGEST_LINE), b"") if line.strip())


def require_column(row: dict[str, Any], key: str, place: str, *, setting: str, parents: str = "") -> Any:
    """Return the value of a column, or of a field in a column of objects (``reward_model.ground_truth``).

    ``setting`` is the config key of the column. ``parents`` are the columns around ``row`` ("meta."), for the message.

    Raises:
        ConfigError: the column is missing. The message lists the existing columns.
    """
    if key in row:
        return row[key]
    parent, _, name = key.partition(".")
    if name and isinstance(row.get(parent), dict):
        return require_column(row[parent], name, place, setting=setting, parents=f"{parents}{parent}.")
    columns = ", ".join(sorted(f"{parents}{column}" for column in row)) or "none"
    raise ConfigError(f"{place}: no column {parents + key!r}; there are: {columns}. Set {setting} to one of them")


def checked_prompt(content: Any, place: str, *, parts: bool = False) -> str | list[dict[str, Any]]:
    """Check a prompt and return it: a text, or messages without null fields (parquet adds the fields of all messages to each).

    ``parts``: allow a list of texts and images as the content of a message.

    Raises:
        ConfigError: it is neither a text nor messages, is empty, or contains characters that break later stages.
    """
    if isinstance(content, str):
        check_characters(content, place)
        if not content.strip():
            raise ConfigError(f"{place}: the prompt is empty; remove the row")
        return content
    if not isinstance(content, list):
        found = f"{type(content).__name__} {content!r:.60}"
        raise ConfigError(f"{place}: a prompt is a string or a list of {{role, content}}, found {found}")
    messages = [_message(message, place, parts) for message in content]
    if not any(_says_something(message["content"]) for message in messages):
        raise ConfigError(f"{place}: the prompt is empty; remove the row")
    return messages


def checked_response(text: Any, place: str) -> str:
    """Check a training response and return it.

    Raises:
        ConfigError: it is not a text, is empty, or contains characters that break later stages.
    """
    if not isinstance(text, str) or not text.strip():
        found = f"found {text!r:.60}"
        raise ConfigError(
            f"{place}: a response is a text, not empty, {found}; rlhf-mcore prepare-data converts other shapes"
        )
    check_characters(text, place)
    return text


def ground_truth(row: dict[str, Any], answer_key: str | None, place: str, setting: str = "data.answer_key") -> Any:
    """Return the column ``answer_key`` if it is given, else reward_model.ground_truth, else the column "answer", else None.

    Raises:
        ConfigError: the column ``answer_key`` is missing, or reward_model is not an object.
    """
    if answer_key is not None:
        return require_column(row, answer_key, place, setting=setting)
    answer = mapping(row, "reward_model", place).get("ground_truth")
    return answer if answer is not None else row.get("answer")


def mapping(row: dict[str, Any], key: str, place: str) -> dict[str, Any]:
    """Return a copy of a column that contains an object, or {} if it is null or missing.

    Raises:
        ConfigError: it contains another type, or values that JSON cannot represent.
    """
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: column {key!r} must be an object, found {type(value).__name__} {value!r:.60}")
    check_plain(value, f"{place}, column {key!r}")
    return dict(value)


def check_plain(value: Any, place: str) -> None:
    """Reject values that JSON cannot represent, because rows are written to rollout files and sent between ranks.

    Raises:
        ConfigError: the value is not JSON; the message names its type.
    """
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not a value that JSON has ({error}); make it a text or a number") from error


def check_characters(value: Any, place: str) -> None:
    """Reject texts with characters that break later stages.

    Raises:
        ConfigError: the text contains one; the message names the character and its position.
    """
    bad = BAD_CHARACTERS.search(value) if isinstance(value, str) else None
    if bad is not None:
        kind = "a NUL character" if bad.group() == "\x00" else f"a lone surrogate (U+{ord(bad.group()):04X})"
        raise ConfigError(f"{place}: {kind} at character {bad.start()}; clean the text")


def _message(message: Any, place: str, parts: bool) -> dict[str, Any]:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, (str, list) if parts else str) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{place}: a message needs a text role and a text content, found {message!r:.80}")
    pieces = content if isinstance(content, list) else [content]
    for text in (message["role"], *(piece.get("text") if isinstance(piece, dict) else piece for piece in pieces)):
        check_characters(text, place)
    return {key: value for key, value in message.items() if value is not None}


def _says_something(content: str | list[Any]) -> bool:
    return bool(content if isinstance(content, list) else content.strip())


# ------------------------------------------------------------------------------------------------------------- columns
def file_keys(data: DataConfig, files: Sequence[str], field: str) -> list[tuple[str, str | None]]:
    """Return (prompt column, answer column) for each file of ``field``, data.train or data.eval."""
    prompts, answers = (_spread(key, len(files)) for key in chosen_columns(data, field))
    return list(zip(prompts, answers, strict=True))


def chosen_columns(data: DataConfig, field: str) -> tuple[Any, Any]:
    if field != "data.eval":
        return data.prompt_key, data.answer_key
    prompt = data.prompt_key if data.eval_prompt_key is None else data.eval_prompt_key
    return prompt, data.answer_key if data.eval_answer_key is None else data.eval_answer_key


def settings_of(field: str) -> tuple[str, str]:
    """Return the keys that name the columns of ``field``, for messages. Keys of data.eval begin with eval_."""
    own = "eval_" if field == "data.eval" else ""
    return f"data.{own}prompt_key", f"data.{own}answer_key"


def _spread(value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    return value if len(value) == count else value[:1] * count


def wanted_columns(data: DataConfig, prompt_key: str, response_keys: Sequence[str]) -> dict[str, str]:
    """Return the columns of an example by their keys: the prompt, then its responses."""
    responses = {key: getattr(data, key.removeprefix("data.")) for key in response_keys}
    return {"data.prompt_key": prompt_key, **responses}


def example_contents(row: dict[str, Any], columns: Mapping[str, str], place: str) -> tuple[str, Any, list[str]]:
    """Return (place, content of the prompt, responses) of a row. ``columns`` is the result of ``wanted_columns``.

    Raises:
        ConfigError: a column is missing, or a response is not a text.
    """
    (prompt_key, prompt_column), *responses = columns.items()
    if len(responses) == 1 and MESSAGES in row and responses[0][1] not in row:
        prompt, answers = _split(row[MESSAGES], f"{place}, column {MESSAGES!r}")
    else:
        prompt = require_column(row, prompt_column, place, setting=prompt_key)
        answers = {column: require_column(row, column, place, setting=key) for key, column in responses}
    texts = [
        checked_response(_join_text_parts(text), f"{place}, column {column!r}") for column, text in answers.items()
    ]
    return place, prompt, texts


def _join_text_parts(response: Any) -> Any:
    """Join the texts of a response that is a list of text parts. Return other values unchanged."""
    parts = response if isinstance(response, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    only_texts = len(texts) == len(parts) and all(part.get("type") == "text" for part in parts)
    return "".join(texts) if parts and only_texts else response


def _split(messages: Any, place: str) -> tuple[list[Any], dict[str, Any]]:
    """Split a conversation into the messages before the last one, and the last message's content."""
    if not isinstance(messages, list) or len(messages) < 2 or not isinstance(messages[-1], dict):
        raise ConfigError(f"{place}: expected a list of two or more {{role, content}}, found {messages!r:.80}")
    last = messages[-1]
    if last.get("role") != "assistant":
        raise ConfigError(
            f"{place}: the last message is the training target and must be the assistant's, found role {last.get('role')!r}"
        )
    return messages[:-1], {MESSAGES: last.get("content")}


# --------------------------------------------------------------------------------------------------------------- jsonl
def _read_jsonl(path: Path, limits: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    where = f"data file {path}"
    if path.stat().st_size > limits.max_bytes:
        raise _beyond(where, "bytes", "max_bytes", limits.max_bytes)
    with io.BufferedReader(open_file(path, where=where), 2**20) as file:  # type: ignore[type-var]
        number = 0
        while line := file.readline(limits.max_row_bytes + 1):
            number += 1
            place = f"{path}, line {number}"
            if len(line) > limits.max_row_bytes:
                raise _beyond(place, "bytes", "max_row_bytes", limits.max_row_bytes)
            if line.strip():
                yield place, _parse_line(line, place)


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twins([key for key, _ in pairs], place)
        return dict(pairs)

    try:
        row = json.loads(line.decode("utf-8-sig").rstrip("\r\n"), object_pairs_hook=unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        # The text of a JSONDecodeError would count lines within the line
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ConfigError(f"{place}: not valid JSON ({reason}); every line must be one JSON object") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


def _refuse_twins(names: Sequence[str], place: str) -> None:
    if len(set(names)) < len(names):
        twins = sorted(name for name, count in Counter(names).items() if count > 1)
        shown = ", ".join(twins[:3]) + (", ..." if len(twins) > 3 else "")
        raise ConfigError(f"{place}: {shown:.200} appears more than once; keep one column of each name")


def _too_many_rows(place: str, limits: DataConfig) -> ConfigError:
    return ConfigError(
        f"{place}: more than {limits.max_rows} rows, one per {BYTES_PER_ROW} bytes of data.max_bytes; raise data.max_bytes"
    )


def _beyond(place: str, what: str, key: str, limit: int) -> ConfigError:
    return ConfigError(f"{place}: more than data.{key}={limit} {what}; split or shorten it, or raise data.{key}")


# ------------------------------------------------------------------------------------------------------------- parquet
def _read_parquet(path: Path, limits: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    where = f"data file {path}"
    try:
        with parquet.ParquetFile(path) as file:
            _refuse_twins(file.schema_arrow.names, where)
            texts = _check_footer(file.metadata, where, limits)
        number = num_bytes = 0
        # Dictionary-encoded texts stay encoded, so that a thousand references to one long text need little memory.
        with parquet.ParquetFile(path, read_dictionary=texts) as file:
            for batch in file.iter_batches(batch_size=ROWS_PER_READ):
                size = _batch_bytes(batch, number, path, limits)
                num_bytes += size
                if num_bytes > limits.max_bytes:
                    raise _beyond(where, "bytes", "max_bytes", limits.max_bytes)
                step = batch.num_rows if size <= BYTES_PER_CONVERSION else 1
                for start in range(0, batch.num_rows, max(step, 1)):
                    for row in _plain_rows(batch.slice(start, step), where):
                        yield f"{path}, row {number}", row
                        number += 1
    except ConfigError:
        raise
    except (pyarrow.ArrowException, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(f"{where}: not a readable parquet file ({_first_line(error)}); write it again") from error


def _check_footer(metadata: Any, where: str, limits: DataConfig) -> list[str]:
    """Reject files whose footer exceeds the limits. Return the paths of the text columns."""
    if metadata.num_rows > limits.max_rows:
        raise _too_many_rows(where, limits)
    texts = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        if group.total_byte_size > limits.max_bytes:
            raise _beyond(where, "bytes", "max_bytes", limits.max_bytes)
        for column in map(group.column, range(group.num_columns)):
            if column.total_uncompressed_size > (most := limits.max_row_bytes) * max(column.num_values, 1):
                raise _beyond(f"{where}, column {column.path_in_schema}", "bytes in a cell", "max_row_bytes", most)
            if column.physical_type == "BYTE_ARRAY":
                texts.add(column.path_in_schema)
    return sorted(texts)


def _batch_bytes(batch: Any, first_row: int, path: Path, limits: DataConfig) -> int:
    """Return the bytes of a decoded batch. Reject cells beyond the limit."""
    total = 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        size = _num_bytes(column)
        total += size
        if size > limits.max_row_bytes:
            for row in range(len(column)):
                if _num_bytes(column.slice(row, 1)) > limits.max_row_bytes:
                    place = f"{path}, row {first_row + row}, column {name!r}"
                    raise _beyond(place, "bytes", "max_row_bytes", limits.max_row_bytes)
    return total


def _num_bytes(array: Any) -> int:
    """Return the bytes of an array's values, with dictionary references resolved."""
    import pyarrow
    from pyarrow import compute, types

    kind = array.type
    if types.is_dictionary(kind):
        if not (types.is_string(kind.value_type) or types.is_binary(kind.value_type)):
            return int(array.nbytes)
        lengths = compute.binary_length(array.dictionary).cast(pyarrow.int64())
        return int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * len(array) + _num_bytes(array.flatten())
    if types.is_struct(kind):
        return sum(_num_bytes(child) for child in array.flatten())
    return int(array.nbytes)


def _plain_rows(batch: Any, where: str) -> list[dict[str, Any]]:
    import pyarrow

    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        plain_type = _plain_type(column.type)
        try:
            columns.append((column if plain_type == column.type else column.cast(plain_type)).to_pylist())
        except (pyarrow.ArrowException, ValueError, TypeError, KeyError, OverflowError, NotImplementedError) as error:
            reason = f"values of type {column.type} cannot be read ({_first_line(error)})"
            remedy = "remove the column, or make it texts or numbers"
            raise ConfigError(f"{where}, column {name!r}: {reason}; {remedy}") from error
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _plain_type(kind: Any) -> Any:
    """Return the type to read values as, because JSON has no dates, times and decimals."""
    import pyarrow
    from pyarrow import types

    if types.is_duration(kind):
        return pyarrow.int64()
    if types.is_temporal(kind) or types.is_decimal(kind):
        return pyarrow.string()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _plain_type(kind.value_type)
        return kind if inner == kind.value_type else pyarrow.list_(inner)
    if types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        plain = [field.with_type(_plain_type(field.type)) for field in fields]
        return kind if plain == fields else pyarrow.struct(plain)
    return kind


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
