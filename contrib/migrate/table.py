"""Define tables of keys, and apply them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlhf_mcore.config.keys import KEYS
from rlhf_mcore.config.questions import token_multiple

Values = Mapping[str, Any]  # their dotted keys -> values


class Lost(Exception):
    """A key cannot be carried over, for the reason in the message. ``settings`` of ours come closest to it."""

    def __init__(self, reason: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.settings = dict(settings or {})


def same(value: Any) -> Any:
    """Keep a value that means the same in both."""
    return value


@dataclass(frozen=True, slots=True)
class Row:
    """One key of theirs is one key of ours."""

    theirs: str
    ours: str
    convert: Callable[[Any], Any] = same


@dataclass(frozen=True, slots=True)
class Joint:
    """Several keys of theirs together decide several of ours.

    It applies where the first of them is given or has a default; others that are neither are not in the mapping.
    """

    theirs: tuple[str, ...]
    convert: Callable[[Values], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """Everything known about another trainer's configuration.

    ``defaults``: their values for absent keys, where ours differ. ``reasons``: beginnings of keys without a counterpart, and why.
    """

    name: str
    rows: Sequence[Row]
    joints: Sequence[Joint]
    defaults: Values
    reasons: Mapping[str, str]


@dataclass(slots=True)
class Migration:
    """Our settings, and every key of theirs that is not in them."""

    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)
    lost: dict[str, tuple[Any, str]] = field(default_factory=dict)  # key -> value, reason
    notes: list[str] = field(default_factory=list)  # what is left to do
    decisions: list[str] = field(default_factory=list)  # what had to be decided to read a script
    stand_ins: dict[str, str] = field(default_factory=dict)  # our nearest keys for lost ones -> why they are lost


def apply(table: Table, given: Values) -> Migration:
    """Carry over what the table knows. Every key of ``given`` ends in ``carried`` or in ``lost``."""
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
    """Leave out what configures a critic where the estimator has none: its keys would only be in the way."""
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
    lost = [key for key in here if key not in migration.carried]  # by this, if by nothing else
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
            outside = "its value is not in the script but in what runs it: set it"
            migration.lost[key] = given[key], outside if is_outside else "a value of a kind that this key does not have"
        return
    unknown = sorted(key for key in settings if key not in KEYS)
    assert not unknown, unknown
    migration.settings.update(settings)
    migration.carried.update(key for key in here if key not in migration.lost)


def choose(choices: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Translate a choice; one that is not in the table is lost."""

    def convert(value: Any) -> Any:
        if value not in choices:
            raise Lost(f"{value!r} has no counterpart; there are: {', '.join(map(str, choices))}")
        return choices[value]

    return convert


def path(value: Any) -> str:
    """Keep a path; a home directory is written as our configuration knows it."""
    return re.sub(r"^~(?=/)", "${oc.env:HOME}", str(value))


def files(value: Any) -> list[str]:
    """List one file or several."""
    return [path(file) for file in (value if isinstance(value, list | tuple) else [value])]


def positive(value: Any) -> int:
    """Keep a number of steps of which 0 and less mean never."""
    return max(int(value), 0)


def padded_length(length: int, tp: Any, cp: Any) -> int:
    """Count the tokens of a microbatch of one sequence of ``length``, where context parallelism shares it."""
    multiple = token_multiple(int(tp), int(cp), int(tp) > 1) if int(cp) > 1 else 1
    return -(-length // multiple) * multiple


def pair(first: str, second: str) -> Callable[[Values], dict[str, Any]]:
    """Split a list of two values of theirs, under a single key, into two of ours."""

    def convert(values: Values) -> dict[str, Any]:
        (both,) = values.values()
        return dict(zip((first, second), map(float, both), strict=True))

    return convert


def adapters(rank: str, alpha: str, targets: str, dropout: str, start: str = "") -> Joint:
    """Carry low-rank adapters over, by their keys: none where the rank is 0. ``start``: a directory that training begins from."""

    def convert(values: Values) -> dict[str, Any]:
        if not int(values[rank] or 0):
            return {}
        settings = {
            "rank": int(values[rank]),
            "alpha": float(values.get(alpha, 16)),  # verl's default, and OpenRLHF's
            "targets": adapted_layers(values.get(targets) or "all-linear"),
            "dropout": float(values.get(dropout) or 0.0),
            "path": path(values[start]) if values.get(start) else None,
        }
        return {f"actor.lora.{name}": value for name, value in settings.items() if value}

    return Joint(tuple(key for key in (rank, alpha, targets, dropout, start) if key), convert)


def adapted_layers(named: Any) -> list[str]:
    """List what PEFT's ``target_modules`` name."""
    if isinstance(named, str) and re.search(r"[*\\^$|(]", named):
        raise Lost("a regular expression of names: list layers in actor.lora.targets")
    return [named] if isinstance(named, str) else list(named)


def divide(total: Any, by: Any, what: str) -> int:
    """Divide exactly."""
    if int(total) % int(by):
        raise Lost(f"{what}: {total} is not divisible by {by}")
    return int(total) // int(by)
