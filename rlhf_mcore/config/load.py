"""YAML files and ``a.b=c`` overrides -> a typed ``Config``.

Later wins: the files named by ``base:``, the file itself, the overrides. A preset (``algorithm: grpo`` is short for
``algorithm: {preset: grpo}``) fills only keys that are not set. Values may refer to other keys (``${seed}``) and
to the environment (``${oc.env:NAME,default}``); no other resolver is allowed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, owner_of, type_name
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import fit, types_of
from rlhf_mcore.config.settings import Setting, SettingReader
from rlhf_mcore.config.show import FromEnvironment
from rlhf_mcore.config.yaml_text import interpolated_texts
from rlhf_mcore.foreign import shorten

ALLOWED_RESOLVERS = ("oc.env",)
MISSING = "???"
_STEPS, _EPOCHS, _PRESET = "trainer.num_steps", "trainer.num_epochs", "algorithm.preset"


def load_config(path: str | Path, overrides: Sequence[str] = (), *, without_model: bool = False) -> Config:
    """Read a configuration. Fields that are null for "derived" stay null: see ``derive.resolve``.

    ``path``: a YAML file. A setting in its place (``a.b=c``) is the first of ``overrides``, and no file is read.
    ``without_model``: ``model.path`` need not be set, and is "none" then.

    Raises:
        ConfigError: all unknown keys, wrong types, unresolved or forbidden interpolations and missing values, at once.
    """
    reader = SettingReader()
    if "=" in str(path) and not Path(path).exists():
        overrides = [str(path), *overrides]
    else:
        reader.read_file(Path(path))
    for override in overrides:
        reader.read_override(override)
    if without_model and all(setting.value == MISSING for setting in reader.settings if setting.key == "model.path"):
        reader.read_override("model.path=none")
    if problems := reader.problems + [problem for setting in reader.settings for problem in _setting_problems(setting)]:
        raise ConfigError.many(problems)
    values = _merge_settings(reader.settings)
    problems = _choose_length(values, reader.settings)
    written = {key: value for key, value in values.items() if _refers(value)}
    cfg = Config()
    for key in values.keys() - written:
        _assign(cfg, key, values[key])
    if _PRESET not in written:
        _fill_preset(cfg, values)
    if written:
        problems += _resolve(
            cfg, values, {setting.key: setting for setting in reader.settings if setting.key in written}
        )
    if problems := [*_missing(asdict(cfg), skip=written), *problems]:
        raise ConfigError.many(problems)
    _mark_environment(cfg, written)
    return cfg


def _setting_problems(setting: Setting) -> Iterator[str]:
    """List the problems of one setting, as far as they are known before references are resolved."""
    try:
        if not _refers(setting.value):
            fit(setting.value, _type_of(setting.key), from_text)
            return
        from rlhf_mcore.config.interpolation import examine

        if forbidden := sorted(examine(setting.value).resolvers.difference(ALLOWED_RESOLVERS)):
            yield (
                f"{setting.place}: {setting.key}={_show_value(setting)} uses the resolver {', '.join(forbidden)}; "
                f"only ${{other.key}} and ${{{ALLOWED_RESOLVERS[0]}:NAME}} are allowed"
            )
    except (TypeError, ValueError, OverflowError) as error:
        reason = f" ({_first_line(error)})" if str(error) else ""
        yield f"{setting.place}: {setting.key}={_show_value(setting)} is not valid; expected {type_name(KEYS[setting.key])}{reason}"


def _merge_settings(settings: Sequence[Setting]) -> dict[str, Any]:
    """Merge values by key: later ones win, tables are put together."""
    values: dict[str, Any] = {}
    for setting in settings:
        values[setting.key] = _merge(values.get(setting.key), setting.value)
    return values


def _merge(before: Any, value: Any) -> Any:
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **{name: _merge(before.get(name), child) for name, child in value.items()}}
    return value


def _resolve(cfg: Config, values: dict[str, Any], settings: dict[str, Setting]) -> list[str]:
    """Assign what refers to other keys or to the environment. Returns what is wrong with it."""
    from rlhf_mcore.config.interpolation import MAX_REFERENCES, Tree, count_references, examine, resolution_order

    problems: list[str] = []
    references = {key: examine(values[key]).references for key in sorted(settings, key=lambda key: key != _PRESET)}
    counts: dict[str, int] = {}
    for key, setting in settings.items():
        if count_references(key, references, counts) > MAX_REFERENCES:
            problems.append(
                f"{setting.place}: {key}={_show_value(setting)} refers to more than {MAX_REFERENCES} values, those that they "
                "refer to included; write them out"
            )
    if problems:
        return problems
    tree = Tree(asdict(cfg), {key: values[key] for key in settings})
    for key in resolution_order(references):
        shown = f"{settings[key].place}: {key}={_show_value(settings[key])}"
        try:
            value = tree.resolve(key)
        except ValueError as error:
            problems.append(f"{shown} does not resolve: {_first_line(error)}")
            continue
        try:
            _assign(cfg, key, value)
        except (TypeError, ValueError, OverflowError):  # not shown: the value may come from the environment
            problems.append(f"{shown} resolves to something that is not {type_name(KEYS[key])}")
            continue
        tree.set(key, value)
        if key == _PRESET:
            for name in _fill_preset(cfg, values):
                tree.set(name, getattr(*owner_of(cfg, name)))
    return problems


def _assign(cfg: Config, key: str, value: Any) -> None:
    group, name = owner_of(cfg, key)
    vars(group)[name] = fit(value, _type_of(key), from_text)


def _type_of(key: str) -> Any:
    group, name = owner_of(_DEFAULT, key)
    return types_of(group.__class__)[name]


_DEFAULT = Config()


def from_text(value: Any, hint: Any) -> Any:
    """Convert a single value of YAML or of the environment to a key's type: a text may be what it spells.

    Raises:
        TypeError, ValueError: it is none.
    """
    if hint is Any:
        return value  # columns of files, whose names are checked with these
    if isinstance(value, dict | list) or value is None:
        raise TypeError
    if hint is str:
        return value if isinstance(value, str) else str(value)
    if hint is bool:
        spelled = _SPELLED.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(spelled, int):
            raise TypeError
        return bool(spelled)
    if isinstance(value, bool) or not isinstance(value, (str, int) if hint is int else (str, int, float)):
        raise TypeError
    try:
        return hint(value)
    except ValueError:
        raise TypeError from None  # Python's message quotes the value


_SPELLED = dict.fromkeys(("true", "yes", "y", "on", "1"), True) | dict.fromkeys(("false", "no", "n", "off", "0"), False)


def _refers(value: Any) -> bool:
    return any(interpolated_texts(value))


def _fill_preset(cfg: Config, values: dict[str, Any]) -> list[str]:
    """Set what the preset stands for and nobody has set. Returns the keys.

    Raises:
        ConfigError: there is no such preset.
    """
    preset = cfg.algorithm.preset
    if preset not in PRESETS:
        raise ConfigError(f"algorithm.preset={preset!r} is unknown; choose one of: {', '.join(PRESETS)}")
    filled = {
        f"algorithm.{name}": value for name, value in PRESETS[preset].items() if f"algorithm.{name}" not in values
    }
    for key, value in filled.items():
        _assign(cfg, key, value)
    return list(filled)


def _choose_length(values: dict[str, Any], settings: Sequence[Setting]) -> list[str]:
    """Decide between ``trainer.num_steps`` and ``num_epochs``: the one that was set later counts.

    In one place there can be one of them only.
    """
    steps, epochs = (
        max(
            (place for place, setting in enumerate(settings) if setting.key == key and setting.value is not None),
            default=-1,
        )
        for key in (_STEPS, _EPOCHS)
    )
    if steps < 0 or epochs < 0:
        return []
    first, second = (settings[place] for place in (steps, epochs))
    if first.source == second.source:
        return [
            f"{first.place}: {_STEPS}={first.value} and {_EPOCHS}={second.value} both tell how long the run is; remove one of them"
        ]
    if steps > epochs:
        values[_EPOCHS] = None
    return []


def _missing(value: Any, key: str = "", *, skip: Collection[str] = ()) -> Iterator[str]:
    """Mandatory keys that are still "???", but for those of ``skip``."""
    if key in skip:
        return
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _missing(child, f"{key}.{name}" if key else str(name), skip=skip)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _missing(child, f"{key}[{index}]")
    elif value == MISSING:
        yield f"{key} is not set; give it a value, as in {key}=..."


def _mark_environment(cfg: Config, written: dict[str, Any]) -> None:
    """Let texts that came from the environment, also by way of another key, know how they were written."""
    marked: set[str] = set()
    texts = {key: list(interpolated_texts(value)) for key, value in written.items()}
    while new := [
        key for key in texts.keys() - marked if any(name in text for text in texts[key] for name in ("oc.env", *marked))
    ]:
        marked.update(new)
    for key in marked:
        group, name = owner_of(cfg, key)
        vars(group)[name] = _from_environment(getattr(group, name), written[key])


def _from_environment(value: Any, written: Any) -> Any:
    if isinstance(value, list) and isinstance(written, list) and len(value) == len(written):
        return [_from_environment(item, text) for item, text in zip(value, written, strict=True)]
    if isinstance(value, str) and isinstance(written, str) and "${" in written:
        return FromEnvironment(value, written)
    return value


def _show_value(setting: Setting) -> str:
    return shorten(repr(setting.value), 200)


def _first_line(error: Exception) -> str:
    return shorten(str(error).partition("\n")[0], 400)
