"""Check the arguments of the Python API, and convert rewards and rows of data to a configuration and its run directory.

Each error message contains the argument, its value and a remedy.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhf_mcore.checkpoint.config_changes import FREE
from rlhf_mcore.config import load
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import leaves
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.environments.function_worker import load_rollout
from rlhf_mcore.foreign import is_plain, shorten
from rlhf_mcore.observability.files import FullDiskError, json_line, write_atomically
from rlhf_mcore.readers.user_functions import OwnFunction, is_file_spec
from rlhf_mcore.rewards.user_function import load_reward
from rlhf_mcore.trainer.inputs import own_files

T = TypeVar("T")
_COLUMNS = ("data_source", "reward_model", "extra_info", "ability", "answer")  # these are always read
DATA_FILES = (".parquet", ".jsonl")
# Keys that may change without starting a new run.
_NOT_THE_RUN = (*FREE, "trainer.num_steps", "data.train", "data.eval")


def refusal(name: str, value: Any, remedy: str) -> ConfigError:
    """Return the error for an invalid argument."""
    return ConfigError(f"{name}={shorten_value(value)} is not valid; {remedy}")


def shorten_value(value: Any) -> str:
    """Return a shortened value for a message."""
    return shorten(repr(value) if isinstance(value, str) else value)


def check(name: str, value: T, is_valid: bool, remedy: str) -> T:
    """Return the value of an argument.

    Raises:
        ConfigError: it is not valid.
    """
    if not is_valid:
        raise refusal(name, value, remedy)
    return value


def checked_config(cfg: Any) -> Config:
    """Return a validated copy of a configuration.

    Raises:
        ConfigError: ``cfg`` is not a configuration, or a list in it was changed to an invalid value.
    """
    if isinstance(cfg, str | os.PathLike):
        raise refusal("cfg", cfg, "read a file with rm.load_config(path)")
    if isinstance(cfg, Mapping):
        raise refusal("cfg", cfg, "make a configuration of a dict with rm.Config(settings)")
    check("cfg", cfg, isinstance(cfg, Config), "give a configuration from rm.load_config or rm.Config")
    copied: Config = cfg.updated()  # lists and tables may have been changed in place
    if copied.model.path == "???":
        raise ConfigError(
            "model.path is not set; give a Hugging Face directory, as in rm.Config(model=...) or cfg.model.path = ..."
        )
    return copied


def checked_path(name: str, value: Any) -> Path:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    is_valid = isinstance(path, str) and path != "" and is_plain(path)
    return Path(
        check(name, value, is_valid, "give a path, as a text or a Path, which is not empty and contains no NUL")
    )


def checked_flag(name: str, value: Any) -> bool:
    return bool(check(name, value, isinstance(value, bool), "give True or False"))


def checked_choice(name: str, value: Any, choices: Sequence[str | None]) -> Any:
    is_choice = (value is None or isinstance(value, str)) and value in choices
    return check(name, value, is_choice, f"choose one of {', '.join(map(str, choices))}")


def checked_list(name: str, value: Any, items: str) -> list[Any]:
    """Return the items of a list, a tuple or another iterable that is not a text or a mapping."""
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | os.PathLike)
    return list(check(name, value, is_list, f"give a list of {items}"))


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, without_model: bool = False) -> Config:
    """Read a configuration from a YAML file. Null values that mean "derived" stay null.

    Args:
        path: path of the file.
        overrides: further settings, ["a.b=c", ...], as on the command line.
        without_model: allow a configuration without ``model.path``, which is then "none".

    Raises:
        ConfigError: the file is invalid. The message lists all unknown keys, wrong types, unresolved references and missing values.
    """
    file, items = checked_path("path", path), "texts such as 'trainer.num_steps=5'"
    texts = checked_list("overrides", overrides, items)
    check("overrides", texts, all(isinstance(text, str) for text in texts), f"give a list of {items}")
    return load.load_config(file, texts, without_model=checked_flag("without_model", without_model))


def run_config(
    cfg: Config | None,
    settings: Mapping[str, Any],
    *,
    reward: Any = None,
    rollout: Any = None,
    prompts: Any = None,
    eval_prompts: Any = None,
) -> Config:
    """Build the configuration of a run from ``cfg`` (optional), settings and the other arguments.

    Without ``cfg`` and ``experiment``, the run directory is named after a digest of the run's inputs. The same call then continues
    its run, and a call with another reward, other prompts or other settings starts a new run. The number of steps, and settings for
    saving and display, do not change the digest.

    Raises:
        ConfigError: an argument is invalid.
    """
    if isinstance(rollout, Mapping):  # the group ``rollout``
        settings, rollout = {**settings, "rollout": rollout}, None
    if cfg is None:
        result = checked_config(Config(settings))
    else:
        result = checked_config(cfg).updated(settings)
    if reward is not None:
        result = result.updated(reward_settings(reward))
    if rollout is not None:
        if not isinstance(rollout, str):
            load_rollout(rollout := OwnFunction(rollout))
        result = result.updated({"rollout.function": rollout})
    rows = {"train": prompts, "eval": eval_prompts}
    names = {"train": "prompts", "eval": "eval_prompts"}
    key = result.data.prompt_key
    given = {name: rows_of(names[name], value, key) for name, value in rows.items() if value is not None}
    for name, content in given.items():
        if not isinstance(content, bytes):
            setattr(result.data, name, content)
    if cfg is None and "experiment" not in settings:
        result.experiment = f"{result.algorithm.preset}-{_digest(result, given)}"
    for name, content in given.items():
        if isinstance(content, bytes):
            setattr(result.data, name, [write_rows(content, result.run_directory / "data" / f"{name}.jsonl")])
    return result


def _digest(cfg: Config, given: Mapping[str, list[str] | bytes]) -> str:
    """Return a digest of a run's inputs, which is equal on every rank and in every process."""
    values = {key: value for key, value in leaves(to_dict(cfg)) if not key.startswith(_NOT_THE_RUN)}
    parts: list[Any] = [sorted(values.items(), key=lambda item: item[0])]
    parts.append(sorted((name, entry["content"]) for name, entry in own_files(cfg).items()))
    for name in ("train", "eval"):
        content = given.get(name)
        parts.append(hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else getattr(cfg.data, name))
    return hashlib.sha256(repr(parts).encode(errors="surrogatepass")).hexdigest()[:8]


def reward_settings(reward: Any) -> dict[str, Any]:
    """Return the settings for a reward: a function, a rule, a list of both, or a dict with the group ``reward``.

    Raises:
        ConfigError: the reward has a different type, or its function does not accept a reward's arguments.
    """
    if isinstance(reward, Mapping):
        return {"reward": reward}
    remedy = (
        "give a function f(data_source, solution_str, ground_truth, extra_info), the name of a rule, or a list of both"
    )
    if isinstance(reward, str | list | tuple):
        return _settings_of_several([reward] if isinstance(reward, str) else reward, remedy)
    if isinstance(reward, type):
        raise refusal("reward", reward, f"{remedy}, or an object of the class: {reward.__name__}()")
    if not callable(reward):
        raise refusal("reward", reward, remedy)
    load_reward(function := OwnFunction(reward), "reward")
    return {"reward.function": function}


def _settings_of_several(rewards: Sequence[Any], remedy: str) -> dict[str, Any]:
    """Return the settings for several functions and rules, each alone or as a pair with its weight."""
    rules: list[Any] = []
    functions: list[Any] = []
    if not rewards:
        raise refusal("reward", rewards, remedy)
    for one in rewards:
        is_pair = isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], int | float)
        what, weight = one if is_pair else (one, 1.0)
        if isinstance(what, str) and not is_file_spec(what):
            rules.append({"name": what, "weight": weight})
        elif isinstance(what, str):
            functions.append({"path": what, "weight": weight})
        elif callable(what) and not isinstance(what, type):
            load_reward(function := OwnFunction(what), "reward")
            functions.append({"path": function, "weight": weight})
        else:
            raise refusal("reward", what, f"{remedy}, each alone or as a pair (function, weight)")
    return {"reward.rules": rules, "reward.functions": functions}


# ------------------------------------------------------------------------------------------------------- rows of data
def rows_of(name: str, given: Any, prompt_key: Any) -> list[str] | bytes:
    """Return the paths of data files, or the rows as lines of JSON.

    Args:
        name: name of the argument, for messages.
        given: one or several paths, texts, rows (dicts), conversations (lists of messages), a pandas table or a Hugging Face
            data set.
        prompt_key: ``data.prompt_key``, the column for texts and conversations.

    Raises:
        ConfigError: ``given`` is none of these.
    """
    wanted = (
        "give a list of texts, or of dicts with the columns that data names, or the path of a .parquet or .jsonl file"
    )
    if isinstance(given, os.PathLike) or _is_data_file(given):
        return [str(checked_path(name, given))]
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        given = given.to_dict("records")
    if isinstance(given, str | Mapping):
        raise ConfigError(f"{name}={shorten_value(given)} is one prompt; {wanted}")
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise refusal(name, given, wanted)
    rows = list(given)
    if not rows:
        raise ConfigError(f"{name}={shorten_value(given)} has no rows; {wanted}")
    if all(isinstance(row, os.PathLike) or _is_data_file(row) for row in rows):
        return [str(checked_path(name, row)) for row in rows]
    key = prompt_key if isinstance(prompt_key, str) else "prompt"
    return b"".join(_line(name, row, key, wanted) for row in rows)


def _is_data_file(given: Any) -> bool:
    return isinstance(given, str) and given.endswith(DATA_FILES) and len(given.split()) == 1


def _line(name: str, row: Any, prompt_key: str, wanted: str) -> bytes:
    is_conversation = isinstance(row, list) and row and all(isinstance(message, Mapping) for message in row)
    if isinstance(row, str) or is_conversation:
        row = {prompt_key: row}
    if not isinstance(row, Mapping):
        raise ConfigError(f"{name}: {shorten_value(row)} is not a prompt; {wanted}")
    if wrong := [column for column in row if not isinstance(column, str)]:
        raise ConfigError(f"{name}: the column name {shorten_value(wrong[0])} of a row is not a text; {wanted}")
    extra = {column: value for column, value in row.items() if column not in (prompt_key, *_COLUMNS)}
    if extra and isinstance(row.get("extra_info") or {}, Mapping):  # rewards read further columns from extra_info
        row = {**row, "extra_info": {**extra, **(row.get("extra_info") or {})}}
    try:
        return json_line(row)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}: {shorten_value(row)} cannot be written as JSON ({error}); store such values as texts or numbers"
        ) from error


def write_rows(content: bytes, path: Path) -> str:
    """Write rows to a file and return its path. Each rank writes the same content.

    Raises:
        ConfigError: the run directory cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except FullDiskError:
        raise
    except OSError as error:
        raise ConfigError(f"output_dir: {path.parent}: {error.strerror}; choose another output_dir") from error
    return os.path.relpath(path)
