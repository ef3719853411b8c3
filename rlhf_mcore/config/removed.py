"""Keys that are no more. A setting of one is accepted for one release, with a warning and a remedy.

A configuration that an earlier release has written down holds all of them; where its value still holds, nothing is said.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.config.errors import for_terminal
from rlhf_mcore.foreign import shorten


@dataclass(frozen=True, slots=True)
class Removed:
    """Tell what holds in the place of a key."""

    value: Any
    instead: str  # what a user does who wants another value


_SCALE = {
    "minimum": Removed(1.0, "nothing sets it: a scale below 1 says that the run diverges"),
    "growth_interval": Removed(1000, "nothing sets it; loss_scale.initial decides where the scale begins"),
    "hysteresis": Removed(2, "nothing sets it; loss_scale.initial decides where the scale begins"),
}
_BOUND = "write a rule of alarms.rules (metric: reward/mean, measure: spike)"
REMOVED = {
    **{f"{role}.optimizer.loss_scale.{name}": was for role in ("actor", "critic") for name, was in _SCALE.items()},
    "reward.alarm.deviations": Removed(5.0, f"for another bound {_BOUND}; alarms.defaults=false switches the line off"),
    "reward.alarm.steps": Removed(20, f"for another bound {_BOUND}"),
    "bridge.digest_every": Removed(100, "every sync is verified by hashes of all tensors"),
    "alarms.timeout_s": Removed(30.0, "a command that takes longer starts a process of its own"),
}


GROUPS = ("reward.alarm",)  # that had such keys and no others


def warn_of(key: str, value: Any, place: str = "") -> None:
    """Warn that a removed key has no effect, unless its value still holds."""
    was = REMOVED[key]
    if value != was.value:
        where = f"{place}: " if place else ""
        text = f"warning: {where}{key}={shorten(value)} has no effect: the key is gone, {was.value} holds; {was.instead}. Remove it"
        sys.stderr.write(f"{for_terminal(text)}\n")
