"""YAML files and ``a.b=c`` overrides -> a typed ``Config``.

Later wins: the files named by ``base:``, the file itself, the overrides. A preset (``algorithm: grpo`` is short for
``algorithm: {preset: grpo}``) fills only those keys that nobody set. Values may refer to other keys (``${seed}``) and
to the environment (``${oc.env:NAME,default}``); no other resolver is allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationValidationError, OmegaConfBaseException

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.interpolations import MAX_REFERENCES, count_references, examine, interpolated_texts
from rlhf_mcore.config.keys import KEYS, type_name
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.show import FromEnvironment
from rlhf_mcore.config.sources import Setting, SettingReader
from rlhf_mcore.foreign import shorten

ALLOWED_RESOLVERS = ("oc.env",)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration. Fields that are null for "derived" stay null: see ``derive.resolve``.

    Raises:
        ConfigError: all unknown keys, wrong types, unresolved or forbidden interpolations and missing values, at once.
    """
    reader = SettingReader()
    reader.read_file(Path(path))
    for override in overrides:
        reader.read_override(override)
    cfg = copy.deepcopy(_defaults())
    problems = reader.problems + [problem for setting in reader.settings for problem in _apply(cfg, setting)]
    if problems:
        raise ConfigError.many(problems)
    problems = list(_missing(OmegaConf.to_container(cfg)))
    last = _last_of_each(reader.settings)
    problems += list(_too_many_references(last)) or [
        problem for setting in last for problem in _unresolved(cfg, setting)
    ]
    if problems:
        raise ConfigError.many(problems)
    _fill_preset(cfg, reader.settings)
    typed = OmegaConf.to_object(cfg)
    assert isinstance(typed, Config)
    _mark_environment(typed, _last_of_each(reader.settings))
    return typed


@cache
def _defaults() -> DictConfig:
    """Built once: omegaconf needs seven times as long to build the tree as to copy it."""
    return OmegaConf.structured(Config)


def _mark_environment(cfg: Config, settings: Sequence[Setting]) -> None:
    """Let texts that came from the environment, also by way of another key, know how they were written."""
    written = {setting.key: text for setting in settings for text in [setting.value] if any(interpolated_texts(text))}
    marked: set[str] = set()
    texts = {key: list(interpolated_texts(value)) for key, value in written.items()}
    while found := [
        key for key in texts.keys() - marked if any(name in text for text in texts[key] for name in ("oc.env", *marked))
    ]:
        marked.update(found)
    for key in marked:
        group, name = _owner(cfg, key)
        setattr(group, name, _from_environment(getattr(group, name), written[key]))


def _owner(cfg: Config, key: str) -> tuple[Any, str]:
    *groups, name = key.split(".")
    owner: Any = cfg
    for group in groups:
        owner = getattr(owner, group)
    return owner, name


def _from_environment(value: Any, written: Any) -> Any:
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_from_environment(item, text) for item, text in zip(value, written, strict=True)]
    if isinstance(value, str) and isinstance(written, str) and "${" in written:
        return FromEnvironment(value, written)
    return value


def _last_of_each(settings: Sequence[Setting]) -> list[Setting]:
    return list({setting.key: setting for setting in settings}.values())


def _apply(cfg: DictConfig, setting: Setting) -> Iterator[str]:
    """Write one setting into the tree; yields what is wrong with it."""
    try:
        if forbidden := sorted(examine(setting.value).resolvers.difference(ALLOWED_RESOLVERS)):
            yield (
                f"{setting.place}: {setting.key}={_shown(setting)} uses the resolver {', '.join(forbidden)}; "
                f"only ${{other.key}} and ${{{ALLOWED_RESOLVERS[0]}:NAME}} are allowed"
            )
            return
        OmegaConf.update(cfg, setting.key, setting.value, merge=True)
    except OmegaConfBaseException as error:
        expected = type_name(KEYS[setting.key])
        reason = f" ({_first_line(error)})" if "${" in str(setting.value) else ""
        if expected.startswith("list of") and isinstance(setting.value, str | int | float):
            reason += f"; write a single one as [{setting.value}]"
        yield f"{setting.place}: {setting.key}={_shown(setting)} is not valid; expected {expected}{reason}"
    except (ValueError, RecursionError) as error:
        yield f"{setting.place}: {setting.key}={_shown(setting)} is not valid: {_first_line(error)}"


def _too_many_references(settings: Sequence[Setting]) -> Iterator[str]:
    """Values that refer to values that refer to others: each step may multiply."""
    references = {setting.key: examine(setting.value).references for setting in settings}
    references = {key: found for key, found in references.items() if found}
    known: dict[str, int] = {}
    for setting in settings:
        if count_references(setting.key, references, known) > MAX_REFERENCES:
            yield (
                f"{setting.place}: {setting.key}={_shown(setting)} refers to more than {MAX_REFERENCES} values, those that they "
                "refer to included; write them out"
            )


def _fill_preset(cfg: DictConfig, settings: Sequence[Setting]) -> None:
    preset = cfg.algorithm.preset
    if preset not in PRESETS:
        raise ConfigError(f"algorithm.preset={preset!r} is unknown; choose one of: {', '.join(PRESETS)}")
    taken = {setting.key for setting in settings}
    for name, value in PRESETS[preset].items():
        if f"algorithm.{name}" not in taken:
            OmegaConf.update(cfg, f"algorithm.{name}", value, merge=True)


def _missing(value: Any, key: str = "") -> Iterator[str]:
    """Mandatory keys that are still "???" in an unresolved tree."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _missing(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _missing(child, f"{key}[{index}]")
    elif value == MISSING:
        yield f"{key} is not set; give it a value, as in {key}=..."


def _unresolved(cfg: DictConfig, setting: Setting) -> Iterator[str]:
    key = setting.key
    if not any(interpolated_texts(setting.value)):
        return
    try:
        value = OmegaConf.select(cfg, key)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except InterpolationValidationError:  # its text quotes the value, which may come from the environment
        yield f"{setting.place}: {key}={_shown(setting)} resolves to something that is not {type_name(KEYS[key])}"
    except (OmegaConfBaseException, RecursionError) as error:
        yield f"{setting.place}: {key}={_shown(setting)} does not resolve: {_first_line(error)}"


def _shown(setting: Setting) -> str:
    return shorten(repr(setting.value), 200)


def _first_line(error: Exception) -> str:
    return shorten(str(error).partition("\n")[0], 400)
