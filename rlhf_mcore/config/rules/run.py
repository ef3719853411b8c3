"""Rules for the output directory, ``checkpoint``, ``logging`` and ``alarms``."""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from os.path import exists, isdir, isfile
from pathlib import Path

from rlhf_mcore.config.choices import TRACKERS, find_trackers
from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.rules.reward import url_problem
from rlhf_mcore.config.schema import AlarmsConfig, Config, LoggingConfig
from rlhf_mcore.config.schema.run import AUTO, NEVER, wanted_trackers
from rlhf_mcore.metrics.catalogue import find_metric, nearest_metric
from rlhf_mcore.plugins import missing_plugin
from rlhf_mcore.redaction import REDACTED

# Arguments of ``load_plugin``.
DELTAS = ("checkpoint_hooks", "deltas", "checkpoint.deltas")
ARCHIVE = ("checkpoint_hooks", "archive", "checkpoint.archive=true")


def path_problems(output_dir: str) -> Iterator[str]:
    """Check that run directories can be created in a directory."""
    folder = Path(output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if exists(parent))
    if not isdir(existing):
        yield f"output_dir={output_dir}: {existing} is a file, not a directory; choose another output_dir"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"output_dir={output_dir}: {existing} is not writable; choose another output_dir"


def checkpoint_problems(cfg: Config) -> Iterator[str]:
    """List problems between the keys of ``checkpoint``, and with their files and plug-ins."""
    checkpoint, metric = cfg.checkpoint, cfg.checkpoint.metric_for_best_model
    if metric is not None and not cfg.data.eval:
        yield f"checkpoint.metric_for_best_model={metric!r} needs held-out prompts, but data.eval=[]; name files in data.eval"
    for is_used, plugin in ((checkpoint.deltas, DELTAS), (checkpoint.archive, ARCHIVE)):
        if is_used and (problem := missing_plugin(*plugin)) is not None:
            yield problem
    resume = checkpoint.resume
    if resume not in (AUTO, NEVER) and not isfile(Path(resume) / "manifest.json"):
        yield f"checkpoint.resume={resume!r} is not a checkpoint directory (with a manifest.json); choose one, or {AUTO} or {NEVER}"


def tracker_problems(cfg: LoggingConfig) -> Iterator[str]:
    """List unknown trackers, and trackers whose package is not installed."""
    if cfg.prometheus is not None and find_spec("prometheus_client") is None:
        missing = "logging.prometheus needs the package prometheus_client, which is not installed"
        yield FileProblem(f"{missing}; pip install prometheus-client, or remove the key")
    trackers = find_trackers()
    for name in wanted_trackers(cfg):
        package, shown = TRACKERS.get(name), f"logging.trackers contains {name!r}"
        if package is None and name not in trackers:
            known = sorted({*TRACKERS, *trackers})
            meant = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {meant[0]}?" if meant else f"choose from: {', '.join(known)}"
            yield f"{shown}, which is not a tracker; {hint}"
        elif name not in trackers:
            plugin = "needs rlhf_mcore_contrib.trackers; pip install rlhf_mcore with its contrib folder"
            yield FileProblem(f"{shown}, which {plugin}, or remove it from logging.trackers")
        elif package is not None and find_spec(package) is None:
            absent = f"{shown}, whose package {package} is not installed"
            yield FileProblem(f"{absent}; pip install 'rlhf_mcore[{name}]', or remove it from logging.trackers")


def alarm_problems(cfg: AlarmsConfig) -> Iterator[str]:
    """List unknown metrics, rules without a bound, and actions without their settings."""
    used = {*cfg.actions, *(action for rule in cfg.rules for action in rule.actions or ())}
    for index, rule in enumerate(cfg.rules):
        key = f"alarms.rules[{index}]"
        if find_metric(rule.metric) is None:
            meant = nearest_metric(rule.metric)
            hint = f"did you mean {meant}?" if meant else "`rlhf-mcore metrics` lists all metrics"
            yield f"{key}.metric={rule.metric!r} is not a metric; {hint}"
        if rule.above is None and rule.below is None:
            yield f"{key}.above and below are null; give {rule.metric} a bound"
    if "webhook" in used and cfg.webhook is None:
        yield "alarms.webhook is null, but an alarm uses the action webhook; set it to a URL"
    remedy = "use the action command with a program that sends it"
    if cfg.webhook is not None and (problem := url_problem(cfg.webhook, remedy)):
        yield f"alarms.webhook {problem} (the value is not shown)"
    if "command" in used and not cfg.command:
        yield "alarms.command=[] is empty, but an alarm uses the action command; set it to a program and its arguments"
    if any(REDACTED in argument for argument in cfg.command):
        yield f"alarms.command contains {REDACTED}, which replaces arguments in saved configurations; write the arguments again"
    if cfg.command and shutil.which(cfg.command[0]) is None:
        program = cfg.command[0].partition(" ")[0]  # the arguments may contain a secret
        absent = f"alarms.command: there is no program {program!r}"
        yield FileProblem(f"{absent}; give its path, and each argument as a separate item")
