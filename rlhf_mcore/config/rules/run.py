"""Rules among the keys at the top, and of ``logging``."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from os.path import exists, isdir
from pathlib import Path

from rlhf_mcore.config.choices import TRACKERS, find_trackers
from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.schema import Config, LoggingConfig
from rlhf_mcore.config.schema.run import wanted_trackers


def path_problems(cfg: Config) -> Iterator[str]:
    """List the problems with the place of the run directory."""
    for key in ("project", "experiment"):
        value = value_of(cfg, key)
        if value in ("", ".", "..") or "/" in value or "\0" in value:
            yield f"{key}={value!r} is the name of a directory of the run; use a name without slashes"
    folder = Path(cfg.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if exists(parent))
    if not isdir(existing):
        yield f"output_dir={cfg.output_dir}: {existing} is a file, not a directory; choose another output_dir"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"output_dir={cfg.output_dir}: {existing} is not writable; choose another output_dir"


def tracker_problems(cfg: LoggingConfig) -> Iterator[str]:
    """List unknown trackers, trackers whose package is not installed, and an address that is none."""
    if cfg.prometheus is not None:
        port = re.fullmatch(r"(?:[^:\s]+:)?(\d{1,5})", cfg.prometheus)
        if port is None or not 1 <= int(port[1]) <= 65535:
            yield f"logging.prometheus={cfg.prometheus!r} is no address; give a port, such as 9464, or host:port, such as 0.0.0.0:9464"
        elif find_spec("prometheus_client") is None:
            yield FileProblem(
                "logging.prometheus needs the package prometheus_client, which is not installed; pip install prometheus-client, or "
                "remove the key"
            )
    for name in wanted_trackers(cfg):
        if name not in TRACKERS and name not in (trackers := find_trackers()):
            meant = difflib.get_close_matches(name, trackers, n=1, cutoff=0.5)
            hint = f"did you mean {meant[0]}?" if meant else f"choose some of: {', '.join(trackers)}"
            yield f"logging.trackers has {name!r}, which is no tracker; {hint}"
        elif name in TRACKERS and find_spec(package := TRACKERS[name].package) is None:
            yield FileProblem(
                f"logging.trackers has {name!r}, and its package {package} is not installed; "
                f"pip install 'rlhf_mcore[{name}]', or remove it from logging.trackers"
            )
