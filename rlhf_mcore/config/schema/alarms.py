"""Alarms: bounds of metrics, and what happens where one is crossed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.key import AT_LEAST_1, FINITE, key, one_of

ACTIONS = ("warn", "save", "stop", "webhook", "command")


@dataclass
class AlarmRuleConfig(Group):
    """A bound of a metric. It replaces the default rules of that metric."""

    metric: str = key("???", "its name, as in [metrics](metrics.md)")
    above: Optional[float] = key(None, "an alarm where it is above", FINITE, null="no upper bound")
    below: Optional[float] = key(None, "an alarm where it is below", FINITE, null="no lower bound")
    measure: str = key(
        "value",
        "what is compared with the bounds",
        one_of(
            value="the step's",
            mean="mean of the last tenth of the steps",
            growth="that mean over the mean of the first tenth",
            spike="the step's over the median",
        ),
    )
    steps: int = key(1, "so many reported steps in a row", AT_LEAST_1)
    actions: Optional[list[str]] = key(None, "what it does", null="as `alarms.actions`")


@dataclass
class AlarmsConfig(Group):
    """Rules on metrics, judged after every step."""

    defaults: bool = key(
        True,
        "the line about a mean score that jumps, and the rules of [metrics](metrics.md#alarms): runaway KL, collapsed entropy, "
        "rewards that are all 0, failing rewards, engine against trainer, spikes of the gradient, skipped updates, numbers that are "
        "not finite",
    )
    actions: list[str] = key(
        ["warn"],
        f"what an alarm does that has no `actions` of its own: {', '.join(ACTIONS)}",
        more="`warn` prints what to do, as the others do too. `save` saves a checkpoint after the step; `stop` saves one "
        "and ends the run with exit code 76, after which nothing starts it again by itself.",
    )
    rules: list[AlarmRuleConfig] = key([], "rules of your own")
    webhook: Optional[str] = key(
        None,
        "`webhook`: where the alarm is posted to, as JSON with a `text`; such as `${oc.env:ALARM_URL}`",
        null="none",
    )
    command: list[str] = key(
        [], "`command`: program and arguments, which gets the same JSON on standard input, and is ended after 30 s"
    )
