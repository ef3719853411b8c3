"""Hands a configuration that is read, checked and resolved from the process that starts a run to its ranks.

The document lives in memory of the starter, as a file without a name: a kill leaves nothing behind, and other users cannot read the
secrets in it. Ranks open it by the starter's process id, and import the schema, not what reads and checks files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import fit, types_of
from rlhf_mcore.config.show import FromEnvironment

Place = list[str | int]


@contextmanager
def offer(cfg: Config) -> Iterator[Path]:
    """Offer ``cfg`` to processes that this one starts. Yields the path that they call ``receive`` with."""
    tree = asdict(cfg)
    document = {"values": tree, "environment": list(_from_environment(tree, []))}
    with os.fdopen(os.memfd_create("rlhf_mcore-config"), "w", encoding="utf-8") as file:
        json.dump(document, file)
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def receive(path: str | Path) -> Config:
    """Build the configuration that the starter of this process offers."""
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    for place, shown in document["environment"]:
        _mark(document["values"], place, shown)
    cfg = Config()
    _assign(cfg, document["values"])
    return cfg


def _assign(group: Any, values: dict[str, Any]) -> None:
    types = types_of(group.__class__)
    for name, value in values.items():
        if is_dataclass(inner := getattr(group, name)):
            _assign(inner, value)
        else:
            vars(group)[name] = fit(value, types[name])


def _from_environment(value: Any, place: Place) -> Iterator[tuple[Place, str]]:
    """Places of texts that came from the environment, each with what is shown of it."""
    if isinstance(value, FromEnvironment):
        yield place, value.shown
    elif isinstance(value, dict | list):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _from_environment(child, [*place, name])


def _mark(tree: Any, place: Place, shown: str) -> None:
    for name in place[:-1]:
        tree = tree[name]
    tree[place[-1]] = FromEnvironment(tree[place[-1]], shown)
