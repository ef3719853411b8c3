"""Rules for the keys outside groups, ``logging`` and ``alarms``."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from os.path import exists, isdir
from pathlib import Path
from urllib.parse import urlsplit

from rlhf_mcore.config.choices import TRACKERS, find_trackers
from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.schema import AlarmRuleConfig, AlarmsConfig, Config, LoggingConfig
from rlhf_mcore.config.schema.run import ACTIONS, wanted_trackers
from rlhf_mcore.metrics.catalogue import find_metric, nearest_metric
from rlhf_mcore.redaction import REDACTED


def path_problems(cfg: Config) -> Iterator[str]:
    """List problems with the path of the run directory."""
    for key in ("project", "experiment"):
        value = value_of(cfg, key)
        if value in ("", ".", "..") or "/" in value or "\0" in value:
            yield f"{key}={value!r} becomes a directory name; use a name without slashes"
    folder = Path(cfg.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if exists(parent))
    if not isdir(existing):
        yield f"output_dir={cfg.output_dir}: {existing} is a file, not a directory; choose another output_dir"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"output_dir={cfg.output_dir}: {existing} is not writable; choose another output_dir"


def tracker_problems(cfg: LoggingConfig) -> Iterator[str]:
    """List unknown trackers, trackers whose package is not installed, and an invalid Prometheus address."""
    if cfg.prometheus is not None:
        port = re.fullmatch(r"(?:[^:\s]+:)?(\d{1,5})", cfg.prometheus)
        if port is None or not 1 <= int(port[1]) <= 65535:
            yield f"logging.prometheus={cfg.prometheus!r} is not an address; give a port, such as 9464, or host:port, as 0.0.0.0:9464"
        elif find_spec("prometheus_client") is None:
            yield FileProblem(
                "logging.prometheus needs the package prometheus_client, which is not installed; pip install prometheus-client, or "
                "remove the key"
            )
    trackers = find_trackers()
    for name in wanted_trackers(cfg):
        package = TRACKERS.get(name)
        if package is None and name not in trackers:
            known = sorted({*TRACKERS, *trackers})
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {meant[0]}?" if meant else f"choose from: {', '.join(known)}"
            yield f"logging.trackers contains {name!r}, which is not a tracker; {hint}"
        elif name not in trackers:
            yield FileProblem(
                f"logging.trackers contains {name!r}, which needs rlhf_mcore_contrib.trackers; pip install rlhf_mcore with its "
                "contrib folder, or remove it from logging.trackers"
            )
        elif package is not None and find_spec(package) is None:
            yield FileProblem(
                f"logging.trackers contains {name!r}, whose package {package} is not installed; "
                f"pip install 'rlhf_mcore[{name}]', or remove it from logging.trackers"
            )


def alarm_problems(cfg: AlarmsConfig) -> Iterator[str]:
    """List unknown metrics, rules without a bound, and actions without their settings."""
    used = set(cfg.actions)
    yield from _action_problems("alarms.actions", cfg.actions)
    for index, rule in enumerate(cfg.rules):
        yield from (f"alarms.rules[{index}].{problem}" for problem in _rule_problems(rule))
        yield from _action_problems(f"alarms.rules[{index}].actions", rule.actions or [])
        used |= set(rule.actions or [])
    if "webhook" in used and cfg.webhook is None:
        yield "alarms.webhook is null, but an alarm uses the action webhook; set it to a URL"
    if cfg.webhook is not None and (problem := _webhook_problem(cfg.webhook)):
        yield f"alarms.webhook {problem} (the value is not shown)"
    if "command" in used and not cfg.command:
        yield "alarms.command=[] is empty, but an alarm uses the action command; set it to a program and its arguments"
    if any(REDACTED in argument for argument in cfg.command):
        yield f"alarms.command contains {REDACTED}, which replaces arguments in saved configurations; write the arguments again"
    if cfg.command and shutil.which(cfg.command[0]) is None:
        program = cfg.command[0].partition(" ")[0]  # the arguments may contain a secret
        yield FileProblem(
            f"alarms.command: there is no program {program!r}; give its path, and each argument as a separate item"
        )


def _webhook_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or "<" in url:
        return "is not a URL; write it as https://host/path, or as ${oc.env:NAME}"
    if "@" in parts.netloc:
        return "contains a login, which is not sent; use the action command with a program that sends it"
    if any(not "!" <= letter <= "~" for letter in url):
        return "contains a space or a character outside ASCII; escape it, as in %20"
    return None


def _rule_problems(rule: AlarmRuleConfig) -> Iterator[str]:
    if find_metric(rule.metric) is None:
        meant = nearest_metric(rule.metric)
        hint = f"did you mean {meant}?" if meant else "`rlhf-mcore metrics` lists all metrics"
        yield f"metric={rule.metric!r} is not a metric; {hint}"
    if rule.above is None and rule.below is None:
        yield f"above and below are null; give {rule.metric} a bound"


def _action_problems(key: str, actions: list[str]) -> Iterator[str]:
    for action in actions:
        if action not in ACTIONS:
            meant = difflib.get_close_matches(action, ACTIONS, n=1)
            hint = f"did you mean {meant[0]}?" if meant else f"choose from: {', '.join(ACTIONS)}"
            yield f"{key} contains {action!r}, which is not an action; {hint}"
