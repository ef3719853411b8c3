#!/usr/bin/env python3
"""Write configs/base.yaml, configs/schema.json and docs/reference/config/ from the schema.

    .venv/bin/python tools/document_config.py

A test compares the files with the texts that this module generates.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf_mcore.commands.config import json_schema  # noqa: E402
from rlhf_mcore.config.choices import PRESETS  # noqa: E402
from rlhf_mcore.config.keys import DESCRIPTIONS, KEYS, type_name  # noqa: E402
from rlhf_mcore.config.schema import Config  # noqa: E402
from rlhf_mcore.config.schema.group import (  # noqa: E402
    Description,
    Group,
    describe_keys,
    text_below,
)
from tools.doc_links import GENERATED, WIDE, relative_links  # noqa: E402

BASE, SCHEMA = ROOT / "configs" / "base.yaml", ROOT / "configs" / "schema.json"
PAGES = ROOT / "docs" / "reference" / "config"
RUN = "run"  # page of the keys that are in no group
WIDTH = 128
BASE_HEAD = """\
# yaml-language-server: $schema=schema.json
# Every key, with its default. Written by tools/document_config.py from rlhf_mcore/config/schema.
# Your own config starts with `base: <path to this file>` and sets only the keys that differ. A key on the command line
# (`trainer.num_steps=10`) wins over both. Values may refer to other keys, ${seed}, and to the environment, ${oc.env:NAME} or
# ${oc.env:NAME,default}. `???` must be set. Paths are relative to the working directory.
"""
OF_PRESETS = {f"algorithm.{name}" for preset in PRESETS.values() for name in preset}  # commented out in the base


class Item(NamedTuple):
    """A key of a group, with its value and description."""

    name: str
    value: Any
    described: Description
    more: str  # further sentences


def items(group: Group) -> list[Item]:
    """List the keys of a group."""
    kind = type(group)
    return [Item(name, value, describe_keys(kind)[name][1], text_below(kind, name)) for name, value in group]


# -------------------------------------------------------------------------------------------------------------- base.yaml
def base_yaml() -> str:
    """Write the text of configs/base.yaml."""
    cfg, lines = Config(), []
    for item in items(cfg):
        value, about = getattr(cfg, item.name), item.described
        if isinstance(value, Group):
            words = f"{about.help[0].upper()}{about.help[1:]}. {_plain(item.more)}".strip()
            lines += ["", *(f"# {line}" for line in _wrap(words, WIDTH - 2)), f"{item.name}:"]
            lines += _block(value, f"{item.name}.", "  ")
        else:
            lines += _entry(item.name, _scalar(value), comment(about), "", is_preset=False)
    return BASE_HEAD + "\n" + "\n".join(lines) + "\n"


def _block(group: Any, prefix: str, indent: str, like: str = "") -> Iterator[str]:
    """Return the lines for a group. ``like``: a key that already describes the same keys, so that comments are not repeated."""
    for item in items(group):
        key, value = f"{prefix}{item.name}", getattr(group, item.name)
        is_preset, remark = key in OF_PRESETS, comment(item.described)
        if isinstance(value, Group):
            repeats = like or (
                f"actor.{item.name}" if type(value) in _ACTOR and not prefix.startswith("actor.") else ""
            )
            flow = _flow(value)
            if repeats and len(indent) + len(item.name) + len(flow) + 2 <= WIDTH:
                remark = "" if like else f"as {repeats}" + (f", but {remark}" if remark else "")
                yield from _entry(item.name, flow, remark, indent, is_preset=False)
            else:
                yield from _entry(
                    item.name, "", f"as {repeats}" if repeats and not like else remark, indent, is_preset=False
                )
                yield from _block(value, f"{key}.", f"{indent}  ", repeats)
        elif isinstance(value, list) and value and isinstance(value[0], Group):
            yield from _entry(item.name, "", remark, indent, is_preset=False)
            for element in value:
                inner = list(_block(element, f"{key}.", f"{indent}    "))
                first = next(place for place, line in enumerate(inner) if not line.lstrip().startswith("#"))
                yield from (line[2:] for line in inner[:first])
                yield f"{indent}  - {inner[first].lstrip()}"
                yield from inner[first + 1 :]
        else:
            yield from _entry(item.name, _scalar(value), "" if like else remark, indent, is_preset=is_preset)


_ACTOR = {type(getattr(Config().actor, item.name)) for item in items(Config().actor)}


def _entry(name: str, value: str, remark: str, indent: str, *, is_preset: bool) -> Iterator[str]:
    """Return the lines for a key with its comment: on the same line if it fits, else above."""
    line = f"{indent}{'# ' if is_preset else ''}{name}:{' ' if value else ''}{value}"
    if remark and len(line) + len(remark) + 3 > WIDTH:
        yield from (f"{indent}# {part}" for part in _wrap(remark, WIDTH - len(indent) - 2))
        remark = ""
    yield line + (f" # {remark}" if remark else "")


def comment(about: Description) -> str:
    """Describe a key in a comment: its meaning, and its choices."""
    names = (*about.choices.names, about.choices.form) if about.choices and about.choices.names else ()
    choices = " | ".join(filter(None, names))
    return _plain(": ".join(filter(None, (about.help, choices))))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _plain(markdown: str) -> str:
    return re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", markdown).replace("`", "")


def _flow(value: Any) -> str:
    if isinstance(value, Group):
        return "{ " + ", ".join(f"{item.name}: {_flow(getattr(value, item.name))}" for item in items(value)) + " }"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if yaml.safe_load(value) == value else f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


# ------------------------------------------------------------------------------------------------------------------ pages
def pages() -> dict[str, str]:
    """Return name -> text of the pages of docs/reference/config/: one per group, and one for the keys that are in no group."""
    cfg = Config()
    single = [item for item in items(cfg) if not isinstance(getattr(cfg, item.name), Group)]
    made = {RUN: _page("Keys outside groups", "", _table(single, cfg, ""))}
    for item in items(cfg):
        value, about = getattr(cfg, item.name), item.described
        if isinstance(value, Group):
            intro = f"{about.help[0].upper()}{about.help[1:]}. {item.more}".strip()
            made[item.name] = _page(f"`{item.name}`", intro, _table(items(value), value, f"{item.name}."))
    return {name: relative_links(text, f"reference/config/{name}.md") for name, text in made.items()}


def _page(title: str, intro: str, table: str) -> str:
    parts = [f"# {title}", GENERATED.format("tools/document_config.py"), *([intro] if intro else []), table]
    return WIDE + "\n\n".join(parts)


def _table(listed: list[Item], group: Group, prefix: str) -> str:
    rows = [row for item in listed for row in _rows(item, getattr(group, item.name), prefix)]
    head = ["| key | default | values | fixed on resume | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _row(key: str, hint: Any, value: Any, item: Item) -> str:
    about = DESCRIPTIONS.get(key, item.described)
    condition = f"Only with `{about.only_with}`" if about.only_with else ""
    meaning = ". ".join(filter(None, (about.help, condition, item.more)))
    return f"| `{key}` | `{default(value)}` | {values(hint, about)} | {'yes' if about.is_fixed else ''} | {meaning} |"


def _rows(item: Item, value: Any, prefix: str) -> Iterator[str]:
    key = f"{prefix}{item.name}"
    if not isinstance(value, Group):
        yield _row(key, KEYS[key], value, item)
        if isinstance(value, list) and value and isinstance(value[0], Group):
            kind = type(value[0])
            for inner in items(kind()):
                yield _row(f"{key}[*].{inner.name}", describe_keys(kind)[inner.name][0], inner.value, inner)
    elif type(value) in _ACTOR and not prefix.startswith("actor."):
        yield f"| `{key}.*` | as `actor.{item.name}.*` | | | {item.described.help} |"
        yield from (
            row for child in _changed_fields(value) for row in _rows(child, getattr(value, child.name), f"{key}.")
        )
    else:
        yield from (row for child in items(value) for row in _rows(child, getattr(value, child.name), f"{key}."))


def _changed_fields(value: Any) -> list[Any]:
    """Return the fields whose values differ from the defaults of their class."""
    plain = type(value)()
    return [item for item in items(value) if getattr(value, item.name) != getattr(plain, item.name)]


def default(value: Any) -> str:
    """Return a default value in the format of the page."""
    if isinstance(value, list):
        return "[" + ", ".join(default(element) for element in value) + "]"
    if isinstance(value, Group):
        return (
            "{"
            + ", ".join(f"{item.name}: {default(getattr(value, item.name))}" for item in _changed_fields(value))
            + "}"
        )
    if isinstance(value, bool):
        return str(value).lower()
    return "required" if value == "???" else "null" if value is None else str(value)


def values(hint: Any, about: Description) -> str:
    """Describe the allowed values of a key: its choices, or its type and range."""
    if about.choices is not None and about.choices.names:
        names = [f"`{name}`" for name in (*about.choices.names, about.choices.form) if name]
        names += ["`null`"] if type_name(hint).endswith("null") else []
        joined = f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]
        return f"list of {joined}" if type_name(hint).startswith("list") else joined
    words = "true or false" if hint is bool else re.sub(r"\{.*\}", "rules", type_name(hint))
    return ", ".join(filter(None, (words, about.range, str(about.choices or ""))))


def schema_text() -> str:
    """Write the text of configs/schema.json, for editors."""
    return json.dumps(json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    BASE.write_text(base_yaml(), encoding="utf-8")
    PAGES.mkdir(parents=True, exist_ok=True)
    for page in PAGES.glob("*.md"):
        page.unlink()
    for name, text in pages().items():
        (PAGES / f"{name}.md").write_text(text, encoding="utf-8")
