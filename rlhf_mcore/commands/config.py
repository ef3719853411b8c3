"""``rlhf-mcore config show|diff|explain|schema``: print or compare configurations, explain a key, print the JSON Schema."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_origin

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import add_completed, add_overrides, command_parser
from rlhf_mcore.cli.terminal import align_columns, say
from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import (
    DESCRIPTIONS,
    KEYS,
    is_group,
    item_type,
    leaves,
    type_name,
    value_of,
    walk,
)
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.other_names import hint
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import (
    Description,
    Group,
    Item,
    describe_keys,
    inner_types,
    is_group_type,
    text_below,
    to_dict,
)
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.redaction import redact

_REFERENCE = {"type": "string", "pattern": r"\$\{"}  # a reference to another key or to an environment variable
_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_SCALARS = {int: "integer", float: "number", bool: "boolean", str: "string"}


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand and print its lines. Returns the exit code."""
    args = _parser().parse_args(argv)
    say("\n".join(args.lines(args)))
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore config",
        "Show a resolved configuration, compare two configurations, explain a key, or print the JSON Schema.",
        examples=[
            "rlhf-mcore config show configs/quickstart/grpo.yaml trainer.num_steps=5 --changed",
            "rlhf-mcore config diff configs/quickstart/grpo.yaml outputs/quickstart/grpo",
            "rlhf-mcore config explain rollout.sampling.n",
            "rlhf-mcore config explain algorithm.kl",
            "rlhf-mcore config schema > rlhf_mcore.schema.json",
        ],
    )
    commands = parser.add_subparsers(metavar="show|diff|explain|schema", required=True)
    show = commands.add_parser("show", help="print the resolved configuration, with all derived values")
    show.add_argument("config", metavar="CONFIG", help="YAML file, or the directory of a run or a checkpoint")
    add_overrides(show)
    show.add_argument("--changed", action="store_true", help="print only values that differ from the defaults")
    show.set_defaults(lines=_show)
    diff = commands.add_parser("diff", help="print the keys in which two configurations differ")
    diff.add_argument("first", metavar="CONFIG", help="YAML file, or the directory of a run or a checkpoint")
    diff.add_argument("second", metavar="CONFIG")
    diff.set_defaults(lines=_diff)
    explain = commands.add_parser("explain", help="explain a key or a group of keys, and list the allowed values")
    add_completed(explain, lambda **_: KEYS, "key", metavar="KEY", help="key with dots, or its last part")
    explain.set_defaults(lines=lambda args: _explain(args.key))
    schema = commands.add_parser("schema", help="print the JSON Schema of configurations, for editors")
    schema.set_defaults(lines=lambda args: [json.dumps(json_schema(), indent=1)])
    return parser


# -------------------------------------------------------------------------------------------------------------- show, diff
def _show(args: argparse.Namespace) -> Iterator[str]:
    cfg = _read(args.config, args.overrides)
    if args.changed:
        values, defaults = _values(cfg), _values(resolve(Config()))
        yield from (f"{key}: {_show_value(value)}" for key, value in values.items() if defaults.get(key) != value)
    else:
        yield to_yaml(cfg).rstrip()


def _diff(args: argparse.Namespace) -> Iterator[str]:
    first, second = (_values(_read(name)) for name in (args.first, args.second))
    keys = [key for key in dict.fromkeys([*first, *second]) if first.get(key) != second.get(key)]
    if not keys:
        yield "the same"
        return
    yield from align_columns((key, _show_value(first.get(key)), _show_value(second.get(key))) for key in keys)


def _read(name: str, overrides: Sequence[str] = ()) -> Config:
    path = Path(name)
    if path.is_dir():
        path /= "config.yaml"
    return resolve(load_config(path, overrides))


def _values(cfg: Config) -> dict[str, Any]:
    """Return the values of a configuration by dotted key, with secrets redacted."""
    return dict(leaves(redact(to_dict(cfg))))


def _show_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ----------------------------------------------------------------------------------------------------------------- explain
def _explain(name: str) -> Iterator[str]:
    """Yield lines that describe every key with this name or last part.

    Raises:
        ConfigError: there is no such key.
    """
    keys = [name] if name in KEYS else [key for key in KEYS if key.endswith(f".{name}")]
    if not keys:
        raise ConfigError(f"there is no key {name}; {hint(name)}")
    for place, key in enumerate(keys):
        yield from [""] if place else []
        yield from _group(key) if is_group(key) else _key(key)


def _group(key: str) -> Iterator[str]:
    yield f"{key}: {_meaning(key)}"
    inside = [known for known in KEYS if known.startswith(f"{key}.") and "." not in known[len(key) + 1 :]]
    yield from align_columns(
        ((key, f"{_meaning(key)}{' ...' if is_group(key) else ''}") for key in inside), indent="  "
    )


def _meaning(key: str) -> str:
    return _plain(DESCRIPTIONS[key].help)


def _key(key: str) -> Iterator[str]:
    described, default = DESCRIPTIONS[key], value_of(Config(), key)
    owner, _, last = key.rpartition(".")
    yield f"{key}: {_plain(described.help)}"
    item = item_type(KEYS[key])
    if described.choices is not None and described.choices.names and item is None:
        yield f"  one of   {described.choices}"
    else:
        allowed = filter(None, (type_name(KEYS[key]), described.range, str(described.choices or "")))
        yield f"  type     {', '.join(allowed)}"
    inner = list(walk(item)) if is_group_type(item) else []
    yield from align_columns(((name, _plain(about.help)) for name, _, about in inner), indent="    ")
    shown = f"{len(default)} of them" if inner else "has to be set" if default == "???" else _show_value(default)
    yield f"  default  {shown}"
    of_algorithm = key.removeprefix("algorithm.")
    for name, preset in PRESETS.items():
        if of_algorithm != key and of_algorithm in preset:
            yield f"  preset   {name}: {_show_value(preset[of_algorithm])}"
    if described.only_with:
        yield f"  only with {described.only_with}"
    if described.is_fixed:
        yield "  must not change when a run resumes"
    if more := text_below(KEYS[owner] if owner else Config, last):
        yield f"  {_plain(more)}"


def _plain(markdown: str) -> str:
    """Remove links and code marks from Markdown."""
    return re.sub(r"\[([^]]*)\]\(([^)]*)\)", r"\1 (docs/\2)", markdown).replace("`", "")


# ------------------------------------------------------------------------------------------------------------- JSON Schema
def json_schema() -> dict[str, Any]:
    """Return the schema of a configuration file, draft 2020-12.

    It accepts everything that ``load_config`` reads: ``base``, a preset for ``algorithm``, a path for ``model``, ``${...}`` for any
    value, a single item for a list, and names that installed packages may add. It does not check rules between keys.
    """
    schema = _schema_of_group(Config)
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema["properties"]["base"] = {"description": "files that this one is based on, relative to it", **files}
    preset = {"description": "an algorithm's preset", "enum": list(PRESETS)}
    schema["properties"]["algorithm"] = {"anyOf": [preset, _REFERENCE, schema["properties"]["algorithm"]]}
    path = {"description": "the path of the model", "type": "string"}
    schema["properties"]["model"] = {"anyOf": [path, schema["properties"]["model"]]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rlhf_mcore configuration", **schema}


def _schema_of_group(kind: type[Group]) -> dict[str, Any]:
    properties = {}
    for name, (type_, about) in describe_keys(kind).items():
        default = kind.model_fields[name].get_default(call_default_factory=True)
        property_ = _type(type_, about)
        if not isinstance(default, Group) and default != "???":
            property_["default"] = _plain_default(default)
        words = ". ".join(filter(None, (about.help, text_below(kind, name))))
        properties[name] = {"description": re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words), **property_}
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _plain_default(default: Any) -> Any:
    if isinstance(default, list):
        return [dict(one) if isinstance(one, Group) else one for one in default]
    return default


def _type(hint: Any, about: Description) -> dict[str, Any]:
    if is_group_type(hint):
        return _schema_of_group(hint)
    options = [option for kind in inner_types(hint) for option in _options(kind, about)]
    if inner_types(hint) != (hint,):
        options.append({"type": "null"})
    return {"anyOf": [*options, _REFERENCE]}


def _options(kind: Any, about: Description) -> list[dict[str, Any]]:
    """Return one schema for each notation that YAML files may use for a type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if about.choices is not None and origin is not list:
        names = [{"enum": list(about.choices.names)}] if about.choices.names else []
        return [*names, *([{"type": "string"}] if about.choices.allows is not None else [])]
    if kind in _SCALARS:
        limits = {name: value for bound in about.bounds for name, value in asdict(bound).items() if name in _LIMITS}
        return [{"type": _SCALARS[kind], **{_LIMITS[name]: value for name, value in limits.items()}}]
    if is_group_type(kind):
        return [_schema_of_group(kind), *([{"type": "string"}] if issubclass(kind, Item) else [])]
    if origin is list:
        single = [option for kind in inner_types(arguments[0]) for option in _options(kind, about)]
        return [{"type": "array", "items": {"anyOf": [*single, {"type": "null"}, _REFERENCE]}}, *single]
    if origin is dict:
        return [
            {
                "type": "object",
                "additionalProperties": True if arguments[1] is Any else _type(arguments[1], Description()),
            }
        ]
    return [{}]
