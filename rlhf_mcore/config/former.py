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
        lost: values that a current key no longer allows, as lower-case texts. ``none`` was its default.
        reads: current keys that the translation reads, with their defaults.
        translate: takes the values of ``defaults``, ``lost`` and ``reads``, in this order. Returns settings of current keys, or an
            empty dict.
    """

    instead: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lost: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reads: Mapping[str, Any] = field(default_factory=dict)
    translate: Callable[..., Settings] = lambda *values: {}

    @property
    def keys(self) -> tuple[str, ...]:
        """The arguments of ``translate``."""
        return (*self.defaults, *self.lost, *self.reads)


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
            text = f"warning: {f'{place(key)}: ' if place(key) else ''}{key}={_show(self.was[key])} {ending}"
            sys.stderr.write(f"{for_terminal(text)}\n")


def translate(values: Mapping[str, Any], *, defaults_too: bool = False) -> Iterator[Translation]:
    """Translate the settings of former keys. Default values are translated only with ``defaults_too``, to replace other values.

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
            now = former.translate(*given) if changed or defaults_too else {}
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
_SCALE = "minimum=1, growth_interval=1000 and hysteresis=2 hold; write initial_loss_scale of actor.megatron or critic.megatron"
_BOUND = "write a rule of alarms.rules (metric: reward/mean, measure: spike)"


def _renamed(key: str, **names: str) -> Callable[[Any], Settings]:
    """Return a translation for former values of one key."""
    return lambda value: {key: names[_text(value)]}


_TRIES = "a request has at most 5 attempts within 5 times timeout_s"


def _sleep(sleeps: bool, level: int) -> Settings:
    return {"rollout.sleep_level": (level or 2) if sleeps else 0}


def _offload_of(key: str) -> Former:
    """Return the translation of a frozen model's ``offload`` (formerly null, true or false) and ``offload_by_layer``."""
    choices = {"none": "auto", "true": "always", "false": "never"}

    def merge(by_layer: bool, offload: Any) -> Settings:
        choice = choices.get(_text(offload), offload)
        return {f"{key}.offload": "by_layer" if by_layer and choice != "never" else choice}

    lost = {f"{key}.offload": tuple(choices)}
    return Former(f"set {key}.offload", {f"{key}.offload_by_layer": False}, lost, translate=merge)


def _recompute_of(role: str) -> Former:
    key = f"{role}.recompute.granularity"

    def merge(method: str, granularity: str) -> Settings:
        whole = granularity in ("full", "block")
        return {key: "block" if method == "block" else "full"} if whole else {}

    return Former(f"set {key}", {f"{role}.recompute.method": "uniform"}, reads={key: "off"}, translate=merge)


def _deltas(delta: bool, full_every: int) -> Settings:
    return {"checkpoint.deltas": full_every - 1 if delta else 0}


def _trackers(tensorboard: bool | None, trackers: list[str]) -> Settings:
    others = [name for name in trackers if name != "tensorboard"]
    return {} if tensorboard is None else {"logging.trackers": [*others, *["tensorboard"] * tensorboard]}


def _warmup_of(role: str) -> Former:
    key = f"{role}.optimizer.schedule"

    def merge(updates: int, share: float, total: int | None) -> Settings:
        if share >= 1:
            raise ValueError("a warm-up of the whole run")
        is_resolved = total is not None and updates == math.ceil(
            share * total
        )  # in a configuration that a run has written
        return {f"{key}.warmup": share if share and not is_resolved else updates}

    defaults = {f"{key}.warmup_updates": 0, f"{key}.warmup_ratio": 0.0}
    return Former(f"set {key}.warmup", defaults, reads={f"{key}.total_updates": None}, translate=merge)


def _loss_scale_of(role: str) -> Former:
    key = f"{role}.megatron"
    return Former(
        f"set initial_loss_scale in {key}",
        {f"{role}.optimizer.loss_scale.initial": 65536.0},
        reads={key: None},
        translate=lambda scale, fields: {key: {**(fields or {}), "initial_loss_scale": scale}},
    )


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


FORMER = (
    *(
        Former(_SCALE, {f"{role}.optimizer.loss_scale.{name}": default})
        for role in ("actor", "critic")
        for name, default in (("minimum", 1.0), ("growth_interval", 1000), ("hysteresis", 2))
    ),
    Former(
        f"for another bound {_BOUND}; alarms.defaults=false disables the warning",
        {"reward.alarm.deviations": 5.0, "reward.alarm.steps": 20},
    ),
    Former("every sync is verified by hashes of all tensors", {"bridge.digest_every": 100}),
    Former(
        "the limit is 30.0 s; a command that takes longer must start its own background process",
        {"alarms.timeout_s": 30.0},
    ),
    Former(
        "write bridge.verify=digest",
        lost={"bridge.verify": ("sample", "full")},
        translate=_renamed("bridge.verify", sample="digest", full="digest"),
    ),
    Former("write rollout.sleep_level=0", {"rollout.sleep": True}, reads={"rollout.sleep_level": 2}, translate=_sleep),
    *(_offload_of(key) for key in ("reference", "teacher", "reward.model")),
    *(_recompute_of(role) for role in ("actor", "critic")),
    Former(
        "set checkpoint.deltas, the number of delta saves after each full save",
        {"checkpoint.delta": False, "checkpoint.full_every": 10},
        translate=_deltas,
    ),
    Former("each engine gets enough prompts to stay busy", {"evaluate.prompts_per_batch": None}),
    Former(
        "set logging.trackers",
        {"logging.tensorboard": None},
        reads={"logging.trackers": ["tensorboard"]},
        translate=_trackers,
    ),
    *(_warmup_of(role) for role in ("actor", "critic")),
    *(_loss_scale_of(role) for role in ("actor", "critic")),
    Former(
        "set reward.pool to the address",
        {"reward.ray.address": None},
        reads={"reward.pool": "local"},
        translate=lambda address, pool: {"reward.pool": address} if pool == "ray" else {},
    ),
    Former(
        "set reward.judge.rubric to the path",
        {"reward.judge.rubric_file": None},
        translate=lambda path: {"reward.judge.rubric": path},
    ),
    Former("it is 5 times environment.container.timeout_s", {"environment.container.start_timeout_s": 300.0}),
    Former(
        "set enable_prefix_caching in rollout.vllm",
        {"rollout.prefix_caching": True},
        reads={"rollout.engine": None, "rollout.vllm": None},
        translate=_prefix_caching,
    ),
    Former(
        "set target for an adaptive controller, final for a linear one",
        {"algorithm.kl.controller.name": "fixed"},
        reads={"algorithm.kl.controller.target": None, "algorithm.kl.controller.final": None},
        translate=_kl_controller,
    ),
    Former(
        "write - before the value of checkpoint.metric_for_best_model if smaller is better",
        {"checkpoint.greater_is_better": True},
        reads={"checkpoint.metric_for_best_model": None},
        translate=_best_model,
    ),
    Former(
        "set rollout.engine_timeout_s to a sixtieth of the value",
        {"rollout.server.timeout_s": 3600.0},
        reads={"rollout.engine_timeout_s": 60.0},
        translate=lambda request_s, _: {"rollout.engine_timeout_s": request_s / 60},
    ),
    Former(
        "set data.max_bytes to 4096 times the value",
        {"data.max_rows": 2000000},
        reads={"data.max_bytes": 8589934592},
        translate=lambda rows, size: {"data.max_bytes": 4096 * rows} if 4096 * rows > size else {},
    ),
    Former("the run ends after 5 bad updates in a row", {"trainer.max_bad_updates": 5}),
    Former("an engine is restarted at most 3 times in a row", {"rollout.engine_restarts": 3}),
    Former("the live display shows responses of every 10th step", {"logging.samples": 10}),
    Former(_TRIES, {"reward.remote.deadline_s": 300.0, "reward.remote.retries": 4}),
    Former(_TRIES, {"reward.judge.deadline_s": 600.0, "reward.judge.retries": 4}),
)
BY_KEY = {key: former for former in FORMER for key in (*former.defaults, *former.lost)}
