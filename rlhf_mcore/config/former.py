"""Keys of the last release that were merged or removed. Their settings are translated to current keys.

The configuration that an older run wrote lists all of these keys. Default values are dropped without a warning.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_mcore.config.engine_kinds import engine_kind, is_engine
from rlhf_mcore.config.errors import ConfigError, for_terminal
from rlhf_mcore.foreign import shorten

Settings = dict[str, Any]  # dotted keys and their values


@dataclass(frozen=True, slots=True, eq=False)
class Former:
    """Keys of the last release that are translated together.

    Attributes:
        instead: advice to the user, for messages.
        defaults: the removed keys, with their defaults.
        reads: current keys that the translation reads, with their defaults.
        translate: takes the values of ``defaults``, ``reads`` and ``lost``, in this order. Returns settings of current keys, or an
            empty dict.
        lost: values that a current key no longer allows, as lower-case texts. ``none`` was its default.
    """

    instead: str
    defaults: Mapping[str, Any]
    reads: Mapping[str, Any] = field(default_factory=dict)
    translate: Callable[..., Settings] = lambda *values: {}
    lost: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """The arguments of ``translate``."""
        return (*self.defaults, *self.reads, *self.lost)


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings of former keys, and the settings of current keys that replace them."""

    former: Former
    was: Settings
    changed: tuple[str, ...]  # the keys of ``was`` with other values than their defaults
    now: Settings

    def warn(self, place: Callable[[str], str] = lambda key: "") -> None:
        """Print a line for each changed key. ``place`` returns the file and line of a setting."""
        for key in self.changed:
            now = ", ".join(_settings(self.now))
            ending = f"is now {now}; write that instead" if now else f"has no effect: {self.former.instead}. Remove it"
            where = f"{place(key)}: " if place(key) else ""
            sys.stderr.write(f"{for_terminal(f'warning: {where}{key}={_show(self.was[key])} {ending}')}\n")


def translate(values: Mapping[str, Any]) -> Iterator[Translation]:
    """Translate the settings of former keys. Default values are dropped.

    Raises:
        ConfigError: a former key never allowed the value.
    """
    for former in dict.fromkeys(BY_KEY[key] for key in values if key in BY_KEY):
        was = {key: values[key] for key in former.defaults if key in values}
        was |= {key: values[key] for key, lost in former.lost.items() if key in values and _text(values[key]) in lost}
        changed = tuple(key for key, value in was.items() if value != former.defaults.get(key))
        if not was:
            continue
        defaults = {**former.defaults, **former.reads}
        given = [values.get(key, defaults.get(key)) for key in former.keys]
        try:
            now = former.translate(*given) if changed else {}
        except (TypeError, ValueError) as error:
            key = next(iter(changed or was))
            raise ConfigError(f"{key}={_show(was[key])} is not valid, and the key is gone: {former.instead}") from error
        yield Translation(former, was, changed, now)


def to_current(values: Settings, place: Callable[[str], str] = lambda key: "") -> Settings:
    """Return settings with current keys instead of former keys, and print a warning for each changed former key.

    Settings after the former key win.

    Raises:
        ConfigError: as ``translate``.
    """
    for found in translate(values):
        found.warn(place)
        keys = list(values)
        later = set(keys[max(map(keys.index, found.was)) :]) - {*found.former.keys}
        values = {key: value for key, value in values.items() if key not in found.was}
        values |= {key: value for key, value in found.now.items() if key not in later}
    return values


def is_former_group(key: str) -> bool:
    """Return whether a group contained only former keys, if it is not a current group."""
    return any(name.startswith(f"{key}.") for name in BY_KEY)


def _settings(now: Settings, prefix: str = "") -> Iterator[str]:
    for name, value in now.items():
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_show(value)}"


def _text(value: Any) -> str:
    return str(value).lower()


def _show(value: Any) -> str:
    return _text("null" if value is None else value) if value is None or isinstance(value, bool) else shorten(value)


# ------------------------------------------------------------------------------------------------------------- the table
def _offload_of(key: str) -> Former:
    """Return the translation of a frozen model's ``offload`` (formerly null, true or false) and ``offload_by_layer``."""
    choices = {"none": "auto", "true": "always", "false": "never"}

    def merge(by_layer: bool, offload: Any) -> Settings:
        choice = choices.get(_text(offload), offload)
        return {f"{key}.offload": "by_layer" if by_layer and choice != "never" else choice}

    lost = {f"{key}.offload": tuple(choices)}
    return Former(f"set {key}.offload", {f"{key}.offload_by_layer": False}, {}, merge, lost)


def _of_trained(role: str) -> Iterator[Former]:
    """Yield the translations of keys of a trained model: loss scale, recomputation and warm-up."""
    scale, recompute, schedule = f"{role}.optimizer.loss_scale", f"{role}.recompute", f"{role}.optimizer.schedule"

    def merge_recompute(method: str, granularity: str) -> Settings:
        whole = granularity in ("full", "block")
        return {f"{recompute}.granularity": "block" if method == "block" else "full"} if whole else {}

    def merge_warmup(updates: int, share: float, total: int | None) -> Settings:
        if share >= 1:
            raise ValueError("a warm-up of the whole run")
        # Both are set in a configuration that a run has written
        is_resolved = total is not None and updates == math.ceil(share * total)
        return {f"{schedule}.warmup": share if share and not is_resolved else updates}

    def add_scale(initial: float, fields: Settings | None) -> Settings:
        return {f"{role}.megatron": {**(fields or {}), "initial_loss_scale": initial}}

    for name, default in {"minimum": 1.0, "growth_interval": 1000, "hysteresis": 2}.items():
        yield Former(_SCALE, {f"{scale}.{name}": default})
    advice = f"set initial_loss_scale in {role}.megatron"
    yield Former(advice, {f"{scale}.initial": 65536.0}, {f"{role}.megatron": None}, add_scale)
    granularity = f"{recompute}.granularity"
    yield Former(f"set {granularity}", {f"{recompute}.method": "uniform"}, {granularity: "off"}, merge_recompute)
    warmup = {f"{schedule}.warmup_updates": 0, f"{schedule}.warmup_ratio": 0.0}
    yield Former(f"set {schedule}.warmup", warmup, {f"{schedule}.total_updates": None}, merge_warmup)


def _trackers(tensorboard: bool | None, trackers: list[str]) -> Settings:
    others = [name for name in trackers if name != "tensorboard"]
    return {} if tensorboard is None else {"logging.trackers": [*others, *["tensorboard"] * tensorboard]}


def _prefix_caching(is_on: bool, engine: str | None, arguments: Settings | None) -> Settings:
    has_arguments = engine is None or (is_engine(engine) and engine_kind(engine).reads("rollout.vllm"))
    return {"rollout.vllm": {**(arguments or {}), "enable_prefix_caching": is_on}} if has_arguments else {}


def _kl_controller(name: str, target: float | None, final: float | None) -> Settings:
    key, value = ("target", target) if name == "adaptive" else ("final", final)
    if name not in ("fixed", "adaptive", "linear") or (value is None and name != "fixed"):
        raise ValueError("not the name of a controller, or its number is missing")
    values = {} if name == "fixed" else {key: value}
    return {f"algorithm.kl.controller.{key}": values.get(key) for key in ("target", "final")}


def _best_model(greater: bool, metric: str | None) -> Settings:
    return {} if metric is None else {"checkpoint.metric_for_best_model": metric if greater else f"-{metric}"}


def _deltas(delta: bool, full_every: int) -> Settings:
    return {"checkpoint.deltas": full_every - 1 if delta else 0}


def _sleep(sleeps: bool, level: int) -> Settings:
    return {"rollout.sleep_level": (level or 2) if sleeps else 0}


def _address(address: str | None, pool: str) -> Settings:
    return {"reward.pool": address} if pool == "ray" else {}


def _bytes_of_rows(rows: int, size: int) -> Settings:
    return {"data.max_bytes": 4096 * rows} if 4096 * rows > size else {}


_SCALE = "minimum=1, growth_interval=1000 and hysteresis=2 hold; write initial_loss_scale of actor.megatron or critic.megatron"
_BOUND = (
    "write a rule of alarms.rules (metric: reward/mean, measure: spike); alarms.defaults=false disables the warning"
)
_TRIES = "a request has at most 5 attempts within 5 times timeout_s"
_CONTROLLER, _BEST = "algorithm.kl.controller", "checkpoint.metric_for_best_model"
_TARGETS = {f"{_CONTROLLER}.target": None, f"{_CONTROLLER}.final": None}
FORMER = (
    # Without a replacement
    Former(f"for another bound {_BOUND}", {"reward.alarm.deviations": 5.0, "reward.alarm.steps": 20}),
    Former("every sync is verified by hashes of all tensors", {"bridge.digest_every": 100}),
    Former("the limit is 30 s; a longer command must start its own background process", {"alarms.timeout_s": 30.0}),
    Former("each engine gets enough prompts to stay busy", {"evaluate.prompts_per_batch": None}),
    Former("it is 5 times environment.container.timeout_s", {"environment.container.start_timeout_s": 300.0}),
    Former("the run ends after 5 bad updates in a row", {"trainer.max_bad_updates": 5}),
    Former("an engine requests one core per rank", {"rollout.ray.cpus_per_rank": 1}),
    Former("an engine is restarted at most 3 times in a row", {"rollout.engine_restarts": 3}),
    Former("the live display shows responses of every 10th step", {"logging.samples": 10}),
    Former(_TRIES, {"reward.remote.deadline_s": 300.0, "reward.remote.retries": 4}),
    Former(_TRIES, {"reward.judge.deadline_s": 600.0, "reward.judge.retries": 4}),
    # Merged into another key
    *(_offload_of(key) for key in ("reference", "teacher", "reward.model")),
    *(former for role in ("actor", "critic") for former in _of_trained(role)),
    Former("write rollout.sleep_level=0", {"rollout.sleep": True}, {"rollout.sleep_level": 2}, _sleep),
    Former("set checkpoint.deltas", {"checkpoint.delta": False, "checkpoint.full_every": 10}, translate=_deltas),
    Former("set logging.trackers", {"logging.tensorboard": None}, {"logging.trackers": ["tensorboard"]}, _trackers),
    Former("set reward.pool to the address", {"reward.ray.address": None}, {"reward.pool": "local"}, _address),
    Former(
        "set enable_prefix_caching in rollout.vllm",
        {"rollout.prefix_caching": True},
        {"rollout.engine": None, "rollout.vllm": None},
        _prefix_caching,
    ),
    Former("set target or final of the controller", {f"{_CONTROLLER}.name": "fixed"}, _TARGETS, _kl_controller),
    Former(f"write - before the value of {_BEST}", {"checkpoint.greater_is_better": True}, {_BEST: None}, _best_model),
    Former("set data.max_bytes", {"data.max_rows": 2000000}, {"data.max_bytes": 8589934592}, _bytes_of_rows),
    Former(
        "set reward.judge.rubric to the path",
        {"reward.judge.rubric_file": None},
        translate=lambda path: {"reward.judge.rubric": path},
    ),
    Former(
        "set rollout.engine_timeout_s to a sixtieth of the value",
        {"rollout.server.timeout_s": 3600.0},
        {"rollout.engine_timeout_s": 60.0},
        lambda request_s, _: {"rollout.engine_timeout_s": request_s / 60},
    ),
    Former(
        "write bridge.verify=digest",
        {},
        translate=lambda value: {"bridge.verify": "digest"},
        lost={"bridge.verify": ("sample", "full")},
    ),
)
BY_KEY = {key: former for former in FORMER for key in (*former.defaults, *former.lost)}
