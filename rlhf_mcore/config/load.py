"""Build a ``Config`` from YAML files and ``a.b=c`` overrides.

Later settings win, in this order: the files in ``base:``, the file itself, the overrides. A preset (``algorithm: grpo`` is short for
``algorithm: {preset: grpo}``) fills only keys that are not set. OmegaConf resolves references to other keys (``${seed}``) and to the
environment (``${oc.env:NAME,default}``); pydantic reads the values (``schema``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import nearest
from rlhf_mcore.config.problems import problems_of
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.config.schema.tree import merge, nest, with_preset
from rlhf_mcore.config.settings import SettingReader, interpolated_texts
from rlhf_mcore.foreign import shorten
from rlhf_mcore.redaction import FromEnvironment

MISSING = "???"
_STEPS, _EPOCHS, _PRESET = "trainer.num_steps", "trainer.num_epochs", "algorithm.preset"


class WrongValues(ConfigError):
    """Keys have invalid values.

    Attributes:
        rest: the configuration with the defaults of these keys. Rules can still be checked on it (``validate.report_all``).
        keys: their names.
    """

    def __init__(self, problems: Sequence[str], rest: Config, keys: Sequence[str]) -> None:
        super().__init__(str(ConfigError.many(problems)), problems=problems)
        self.rest, self.keys = rest, keys


def load_config(path: str | Path, overrides: Sequence[str] = (), *, without_model: bool = False) -> Config:
    """Read a configuration. Values that follow from other keys stay null: ``config.resolve`` fills them in.

    Args:
        path: a YAML file. A setting (``a.b=c``) is allowed instead; it becomes the first override, and no file is read.
        overrides: settings as on a command line.
        without_model: allow a missing ``model.path``, which then becomes "none".

    Raises:
        ConfigError: there are unknown keys, invalid values, unresolved references or missing values; it lists all of them.
    """
    reader = SettingReader()
    if "=" in str(path) and not Path(path).exists():
        overrides = [str(path), *overrides]
    else:
        reader.read_file(Path(path))
    for override in overrides:
        reader.read_override(override)
    if without_model and reader.values.get("model.path", MISSING) == MISSING:
        reader.read_override("model.path=none")
    reader.translate_former()
    values, places = reader.values, reader.places
    problems = dict.fromkeys([*reader.problems, *_choose_length(values, places)])
    wrong = {key: [problem] for key, problem in _resolve_references(values, places)}
    cfg = _read(values, places, wrong)
    if wrong or problems:
        found = [*problems, *chain.from_iterable(wrong.values())]
        raise WrongValues(found, cfg, list(wrong)) if reader.is_whole else ConfigError.many(found)
    if missing := list(_missing(to_dict(cfg))):
        raise ConfigError.many(missing)
    return cfg


def _read(values: dict[str, Any], places: Mapping[str, str], wrong: dict[str, list[str]]) -> Config:
    """Build a configuration. Keys with invalid values are added to ``wrong`` with their messages, and get their defaults."""
    while True:
        tree = with_preset(nest({key: value for key, value in values.items() if key not in wrong}))
        try:
            return Config.read(tree)
        except ValidationError as error:
            found = problems_of(Config, error, lambda key: _begin(places, _setting_of(key, values)))
            for key, problem in found.items():
                wrong.setdefault(_setting_of(key.partition("[")[0], values), []).append(problem)


def _setting_of(key: str, values: Collection[str]) -> str:
    """Return the setting that contains a key: the key, or a table or group that was set as a whole."""
    while key not in values and "." in key:
        key = key.rpartition(".")[0]
    return key


def _begin(places: Mapping[str, str], key: str) -> str:
    """Return "file:line: " for a key that a file set, else "", because an override already shows its key."""
    place = places.get(key, "")
    return "" if not place or place.startswith("override ") else f"{place}: "


def _resolve_references(values: dict[str, Any], places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Replace values that refer to other keys or to the environment. Yield unresolved keys with their messages."""
    written = {key: value for key, value in values.items() if any(interpolated_texts(value))}
    if not written:
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def resolve(key: str) -> Any:
        value = OmegaConf.select(tree, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    defaults = to_dict(Config())
    for key, value in list(written.items()):
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException as error:
            yield key, _explain_unresolved(key, value, places, error)
            del written[key], values[key]
    tree = OmegaConf.create(merge(defaults, nest(values)))
    for key in sorted(written, key=lambda key: key != _PRESET):
        try:
            value = resolve(key)
        except (OmegaConfBaseException, RecursionError, ValueError) as error:
            yield key, _explain_unresolved(key, written[key], places, error)
            continue
        values[key] = value
        if key == _PRESET:  # other values may refer to keys of the preset
            tree = OmegaConf.create(merge(defaults, with_preset(nest(values))))
    for key in _from_environment(written):
        values[key] = _mark(values[key], written[key])


def _explain_unresolved(key: str, value: Any, places: Mapping[str, str], error: Exception) -> str:
    reason, remedy = str(error).partition("\n")[0], "write ${seed} for a key, ${oc.env:NAME,default} for a variable"
    if (variable := re.search(r"Environment variable '(\w+)' not found", reason)) is not None:
        reason, remedy = variable[0], f"export it, or give a default, as in ${{oc.env:{variable[1]},default}}"
    elif "Recursive" in reason:
        remedy = "write a value instead of one of the references"
    elif (name := re.search(r"Interpolation key '([\w.]+)' not found", reason)) and (near := nearest(name[1])):
        remedy = f"did you mean ${{{near}}}?"
    shown = f"{_begin(places, key)}{key}={shorten(repr(value), 200)}"
    return f"{shown} does not resolve: {shorten(reason, 400)}; {remedy}"


def _from_environment(written: Mapping[str, Any]) -> set[str]:
    """Return the keys whose texts come from the environment, directly or through other keys."""
    marked: set[str] = set()
    texts = {key: list(interpolated_texts(value)) for key, value in written.items()}
    while new := [
        key for key in texts.keys() - marked if any(name in text for text in texts[key] for name in ("oc.env", *marked))
    ]:
        marked.update(new)
    return marked


def _mark(value: Any, written: Any) -> Any:
    """Mark texts from the environment with their written form, which messages and files show instead of the value."""
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_mark(item, text) for item, text in zip(value, written, strict=True)]
    if isinstance(value, str) and isinstance(written, str) and "${" in written:
        return FromEnvironment(value, written)
    return value


def _choose_length(values: dict[str, Any], places: Mapping[str, str]) -> list[str]:
    """Choose the later setting of ``trainer.num_steps`` and ``num_epochs``. Return a problem if one source sets both."""
    steps, epochs = values.get(_STEPS), values.get(_EPOCHS)
    if steps is None or epochs is None:
        return []
    files = {places[key].rpartition(":")[0] if _begin(places, key) else "" for key in (_STEPS, _EPOCHS)}
    if len(files) == 1:
        return [
            f"{places[_STEPS]}: {_STEPS}={steps} and {_EPOCHS}={epochs} both set the length of the run; remove one of them"
        ]
    if list(values).index(_STEPS) > list(values).index(_EPOCHS):
        values[_EPOCHS] = None
    return []


def _missing(value: Any, key: str = "") -> Iterator[str]:
    """Yield a message for each required key that is still "???"."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _missing(child, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _missing(child, f"{key}[{index}]")
    elif value == MISSING:
        yield f"{key} is not set; give it a value, as in {key}=..."
