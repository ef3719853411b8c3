"""The JSON Schema of configurations, for editors. It is generated from the pydantic models (``schema``)."""

from __future__ import annotations

import re
from typing import Any, get_args, get_origin

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import Group, Item, inner_types, is_group_type
from rlhf_mcore.config.schema.key import Choices, Description, Range, description_of

_REFERENCE = {"type": "string", "pattern": r"\$\{"}  # a reference to another key or to an environment variable
_SCALARS = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_schema() -> dict[str, Any]:
    """Return the schema of a configuration file, draft 2020-12.

    It accepts everything that ``load_config`` reads: ``base``, a preset for ``algorithm``, a path for ``model``, ``${...}`` for any
    value, a single item for a list, and names that installed packages may add. It does not check rules between keys.
    """
    schema = _group(Config)
    files = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    schema["properties"]["base"] = {"description": "files that this one is based on, relative to it", **files}
    preset = {"description": "an algorithm's preset", "enum": list(PRESETS)}
    schema["properties"]["algorithm"] = {"anyOf": [preset, _REFERENCE, schema["properties"]["algorithm"]]}
    path = {"description": "the path of the model", "type": "string"}
    schema["properties"]["model"] = {"anyOf": [path, schema["properties"]["model"]]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rlhf_mcore configuration", **schema}


def _group(kind: type[Group]) -> dict[str, Any]:
    properties = {}
    for name, item in kind.model_fields.items():
        about = description_of(item)
        default = item.get_default(call_default_factory=True)
        property_ = _type(item.annotation, about)
        if not isinstance(default, Group) and default != "???":
            property_["default"] = _plain(default)
        properties[name] = {"description": _describe(about), **property_}
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _plain(default: Any) -> Any:
    if isinstance(default, list):
        return [dict(one) if isinstance(one, Group) else one for one in default]
    return default


def _type(hint: Any, about: Description) -> dict[str, Any]:
    if is_group_type(hint):
        return _group(hint)
    options = [option for kind in inner_types(hint) for option in _options(kind, about)]
    if inner_types(hint) != (hint,):
        options.append({"type": "null"})
    return {"anyOf": [*options, _REFERENCE]}


def _options(kind: Any, about: Description) -> list[dict[str, Any]]:
    """Return one schema for each notation that YAML files may use for a type."""
    if isinstance(about.allowed, Choices) and kind is str:
        names = {"enum": list(about.allowed.meanings)}
        is_open = about.allowed.or_function or about.allowed.adds is not None
        return [names, *([{"type": "string"}] if is_open else [])]
    if kind in _SCALARS:
        bounds = _bounds(about.allowed) if isinstance(about.allowed, Range) else {}
        return [{"type": _SCALARS[kind], **bounds}]
    if is_group_type(kind):
        return [_group(kind), *([{"type": "string"}] if issubclass(kind, Item) else [])]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        single = [option for kind in inner_types(arguments[0]) for option in _options(kind, Description())]
        return [{"type": "array", "items": {"anyOf": [*single, {"type": "null"}, _REFERENCE]}}, *single]
    if origin is dict:
        return [
            {
                "type": "object",
                "additionalProperties": True if arguments[1] is Any else _type(arguments[1], Description()),
            }
        ]
    return [{}]


def _bounds(allowed: Range) -> dict[str, Any]:
    names = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    return {names[name]: value for name, value in allowed.bounds().items()}


def _describe(about: Description) -> str:
    parts = [about.help, *([f"null: {about.null}"] if about.null else [])]
    if isinstance(about.allowed, Choices):
        parts += [f"{name}: {meaning}" for name, meaning in about.allowed.meanings.items() if meaning]
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", "; ".join(filter(None, parts)))
