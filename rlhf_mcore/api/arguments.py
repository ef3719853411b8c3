"""Check the arguments of the Python API. Each error message contains the argument, its value and a remedy."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.foreign import is_plain, shorten


def refusal(name: str, value: Any, remedy: str) -> ConfigError:
    """Return the error for an invalid argument."""
    return ConfigError(f"{name}={shown(value)} is not valid; {remedy}")


def shown(value: Any) -> str:
    """Return a shortened value for a message."""
    return shorten(repr(value) if isinstance(value, str) else value)


def checked_config(cfg: Any) -> Config:
    """Return a validated copy of a configuration.

    Raises:
        ConfigError: ``cfg`` is not a configuration, or a list in it was changed to an invalid value.
    """
    if isinstance(cfg, str | os.PathLike):
        raise refusal("cfg", cfg, "read a file with rm.load_config(path)")
    if isinstance(cfg, Mapping):
        raise refusal("cfg", cfg, "make a configuration of a dict with rm.Config(settings)")
    if not isinstance(cfg, Config):
        raise refusal("cfg", cfg, "give a configuration from rm.load_config or rm.Config")
    copied = cfg.updated()  # lists and tables may have been changed in place
    if copied.model.path == "???":
        raise ConfigError(
            "model.path is not set; give a Hugging Face directory, as in rm.Config(model=...) or cfg.model.path = ..."
        )
    return copied


def checked_path(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise refusal(name, value, "give a path, as a text or a Path")
    if not os.fspath(value) or not is_plain(os.fspath(value)):
        raise refusal(name, value, "give a valid path, which is not empty and contains no NUL")
    return Path(value)


def checked_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise refusal(name, value, "give True or False")
    return value


def checked_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refusal(name, value, "give a number of at least 1")
    return value


def checked_choice(name: str, value: Any, choices: Sequence[str | None]) -> Any:
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ConfigError(f"{name}={shown(value)} is not valid; choose one of {', '.join(map(str, choices))}")
    return value


def checked_list(name: str, value: Any, items: str) -> list[Any]:
    """Return the items of a list, a tuple or another iterable that is not a text or a mapping."""
    if isinstance(value, str | bytes | Mapping | os.PathLike) or not isinstance(value, Iterable):
        raise refusal(name, value, f"give a list of {items}")
    return list(value)


def checked_callback(value: Any, kind: type) -> Any:
    """Return a callback: an object of ``kind``, or a function of a step and its metrics."""
    remedy = f"give functions of (step, metrics), or objects of a subclass of rm.{kind.__name__}"
    if isinstance(value, type):
        raise refusal("callbacks", value, f"{remedy}: {value.__name__}() and not the class")
    if not isinstance(value, kind) and (not callable(value) or not _accepts(value, 1, {})):
        raise refusal("callbacks", value, remedy)
    return value


def _accepts(function: Callable[..., Any], step: int, metrics: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(step, metrics)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
