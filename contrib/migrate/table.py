"""Tables of keys, and their application to a configuration of another trainer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhf_mcore.config.keys import KEYS
from rlhf_mcore.config.questions import token_multiple

Values = Mapping[str, Any]  # dotted keys of the other trainer -> values


class Lost(Exception):
    """A key has no counterpart, for the reason in the message. ``settings`` contains our closest settings."""

    def __init__(self, reason: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.settings = dict(settings or {})


def same(value: Any) -> Any:
    """Return a value unchanged, because it means the same in both trainers."""
    return value


@dataclass(frozen=True, slots=True)
class Row:
    """A key of the other trainer that corresponds to one of our keys."""

    theirs: str
    ours: str
    convert: Callable[[Any], Any] = same


@dataclass(frozen=True, slots=True)
class Joint:
    """Several keys of the other trainer that together determine several of our keys.

    A joint applies if its first key is given or has a default. The mapping for ``convert`` omits keys without value and default.
    """

    theirs: tuple[str, ...]
    convert: Callable[[Values], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """The conversion of another trainer's configuration.

    ``defaults``: defaults of the other trainer that differ from ours. ``reasons``: prefix of keys without a counterpart -> reason.
    """

    name: str
    rows: Sequence[Row]
    joints: Sequence[Joint]
    defaults: Values
    reasons: Mapping[str, str]


@dataclass(slots=True)
class Migration:
    """Our settings, and every key of the other trainer that they do not cover."""

    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)
    lost: dict[str, tuple[Any, str]] = field(default_factory=dict)  # key -> value, reason
    notes: list[str] = field(default_factory=list)  # tasks for the user
    decisions: list[str] = field(default_factory=list)  # decisions that reading a script required
    stand_ins: dict[str, str] = field(default_factory=dict)  # our key that replaces a lost key -> reason of the loss


def apply(table: Table, given: Values) -> Migration:
    """Convert all keys that the table knows. Every key of ``given`` ends in ``carried`` or in ``lost``."""
    migration = Migration(table.name)
    everything = {**table.defaults, **given}
    for row in table.rows:
        if row.theirs in everything:
            _carry(migration, Joint((row.theirs,), partial(_of_row, row)), everything, given)
    for joint in table.joints:
        if joint.theirs[0] in everything:
            _carry(migration, joint, everything, given)
    for key, value in given.items():
        if key not in migration.carried and key not in migration.lost:
            reasons = [name for name in table.reasons if key == name or key.startswith(name + ".")]
            why = table.reasons[max(reasons, key=len)] if reasons else "there is no such key here"
            migration.lost[key] = (value, why)
    _drop_critic(migration, given)
    return migration


def _drop_critic(migration: Migration, given: Values) -> None:
    """Drop the keys of the critic if the estimator uses none, because they would have no effect."""
    estimator = migration.settings.get("algorithm.advantage", "gae")
    if estimator == "gae":
        return
    migration.settings = {key: value for key, value in migration.settings.items() if not key.startswith("critic.")}
    for key in sorted(key for key in migration.carried if "critic" in key and "_critic_" not in key):
        migration.carried.discard(key)
        migration.lost[key] = (given[key], f"{estimator} has no critic")


def _of_row(row: Row, values: Values) -> dict[str, Any]:
    return {row.ours: row.convert(values[row.theirs])}


def _carry(migration: Migration, joint: Joint, everything: Values, given: Values) -> None:
    here = [key for key in joint.theirs if key in given]
    lost = [key for key in here if key not in migration.carried]  # another joint may still carry these keys
    try:
        settings = joint.convert({key: everything[key] for key in joint.theirs if key in everything})
    except Lost as reason:
        migration.lost.update({key: (given[key], str(reason)) for key in lost})
        migration.settings.update(reason.settings)
        migration.stand_ins.update(dict.fromkeys(reason.settings, str(reason)))
        return
    except (TypeError, ValueError, ArithmeticError, KeyError):
        for key in lost:
            is_outside = "${oc.env:" in str(given[key]) or "_is_not_known" in str(given[key])
            outside = "its value is not in the script but comes from its environment; set it"
            migration.lost[key] = given[key], outside if is_outside else "a value of this type is not supported"
        return
    unknown = sorted(key for key in settings if key not in KEYS)
    assert not unknown, unknown
    migration.settings.update(settings)
    migration.carried.update(key for key in here if key not in migration.lost)


def choose(choices: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Return a function that converts a choice. A choice that is not in the table is lost."""

    def convert(value: Any) -> Any:
        if value not in choices:
            raise Lost(f"{value!r} has no counterpart; supported: {', '.join(map(str, choices))}")
        return choices[value]

    return convert


def path(value: Any) -> str:
    """Return a path. A leading ``~`` becomes a reference to HOME."""
    return re.sub(r"^~(?=/)", "${oc.env:HOME}", str(value))


def files(value: Any) -> list[str]:
    """Return a list of files for one file or several."""
    return [path(file) for file in (value if isinstance(value, list | tuple) else [value])]


def positive(value: Any) -> int:
    """Return a number of steps. Values up to 0 mean never and become 0."""
    return max(int(value), 0)


def padded_length(length: int, tp: Any, cp: Any) -> int:
    """Return the tokens of a microbatch with one sequence of ``length`` tokens, padded for context parallelism."""
    multiple = token_multiple(int(tp), int(cp), int(tp) > 1) if int(cp) > 1 else 1
    return -(-length // multiple) * multiple


def pair(first: str, second: str) -> Callable[[Values], dict[str, Any]]:
    """Return a function that splits a key with two values into two of our keys."""

    def convert(values: Values) -> dict[str, Any]:
        (both,) = values.values()
        return dict(zip((first, second), map(float, both), strict=True))

    return convert


def adapters(rank: str, alpha: str, targets: str, dropout: str, start: str = "") -> Joint:
    """Convert low-rank adapters. The arguments are keys. A rank of 0 means no adapters. ``start``: directory of initial adapters."""

    def convert(values: Values) -> dict[str, Any]:
        if not int(values[rank] or 0):
            return {}
        settings = {
            "rank": int(values[rank]),
            "alpha": float(values.get(alpha, 16)),  # default of verl and of OpenRLHF
            "targets": adapted_layers(values.get(targets) or "all-linear"),
            "dropout": float(values.get(dropout) or 0.0),
            "path": path(values[start]) if values.get(start) else None,
        }
        return {f"actor.lora.{name}": value for name, value in settings.items() if value}

    return Joint(tuple(key for key in (rank, alpha, targets, dropout, start) if key), convert)


def adapted_layers(named: Any) -> list[str]:
    """Return the layers in PEFT's ``target_modules`` as a list."""
    if isinstance(named, str) and re.search(r"[*\\^$|(]", named):
        raise Lost("a regular expression is not supported; list layers in actor.lora.targets")
    return [named] if isinstance(named, str) else list(named)


def divide(total: Any, by: Any, what: str) -> int:
    """Divide without remainder. ``what``: subject of the message if there is a remainder."""
    if int(total) % int(by):
        raise Lost(f"{what}: {total} is not divisible by {by}")
    return int(total) // int(by)
