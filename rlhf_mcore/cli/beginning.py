"""What is found out about a run before any process is started, in well under a second: its directory, and how far it has come."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import rlhf_mcore
from rlhf_mcore.checkpoint.delta import verify_chain
from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.config.checkpoint_rules import NEVER
from rlhf_mcore.config.differences import compare_configs, refuse
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.show import redact_arguments, to_yaml
from rlhf_mcore.foreign import SMALL, read_text
from rlhf_mcore.observability.files import pretty_json, write_atomically
from rlhf_mcore.observability.run_directory import RunDirectory

SAVED_AS = {"sft": "actor", "reward_model": "reward"}  # kind of run -> directory of its model in a checkpoint


def is_finished(cfg: Config) -> bool:
    """Look at the run directory, and print where the run begins if it has begun before. Returns whether nothing is left to do.

    Raises:
        ConfigError: the directory cannot be written or is in use, or its newest checkpoint does not fit the configuration.
    """
    directory = RunDirectory.create(cfg.output_dir, cfg.project, cfg.experiment)
    directory.close()
    own, resume = scan(directory.path), cfg.checkpoint.resume
    if not own or resume == NEVER or Path(resume).resolve().parent == directory.path:
        return False
    newest = own[-1]
    try:
        saved = read_text(newest.path / "config.yaml", limit=SMALL.num_bytes, remedy="choose another checkpoint")
        fixed, _ = compare_configs(saved, to_yaml(cfg), by_content=["data.train"])
        damaged = any(problem.is_damage for problem in verify_chain(newest.path, hashes=False))
    except ConfigError:  # the ranks find out what is wrong with it, and whether another one will do
        return False
    refuse(newest.path, fixed)
    if damaged:
        return False
    if newest.step < cfg.trainer.num_steps:
        print(
            f"{os.path.relpath(newest.path)} is there: the run continues after step {newest.step} of {cfg.trainer.num_steps}",
            flush=True,
        )
        return False
    print(finished_text(cfg, newest.path, newest.step), flush=True)
    return True


def finished_text(cfg: Config, checkpoint: Path, step: int) -> str:
    """What a run that is done says when it is started again."""
    return (
        f"this run is finished: {step} steps were made, and trainer.num_steps={cfg.trainer.num_steps}\n"
        f"trained model   {os.path.relpath(checkpoint / SAVED_AS.get(cfg.algorithm.kind, 'actor'))}\n"
        "raise trainer.num_steps to train on, or choose another experiment"
    )


def logs_directory(cfg: Config) -> Path:
    """Make ``<run directory>/logs/<time>`` for the logs of a start, with ``launch.json``: command, host, time and versions.

    Raises:
        ConfigError: it cannot be written.
    """
    logs = Path(cfg.output_dir).resolve() / cfg.project / cfg.experiment / "logs"
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    try:
        names = (stamp if number == 1 else f"{stamp}.{number}" for number in count(1))
        made = next(logs / name for name in names if not (logs / name).exists())
        made.mkdir(parents=True)
        write_atomically(made / "launch.json", pretty_json(_launch_record(now)))
    except OSError as error:
        free = shutil.disk_usage(cfg.output_dir).free
        raise ConfigError(
            f"output_dir={cfg.output_dir!r}: cannot write to {logs} ({error.strerror}; {free} bytes are free); "
            "choose another, or make room"
        ) from error
    return made


def _launch_record(now: float) -> dict[str, object]:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)),
        "command": redact_arguments(sys.argv),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "python": sys.version.split()[0],
        "rlhf_mcore": rlhf_mcore.__version__,
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """Commit of this package, with ``-dirty`` where files differ from it; None outside of a clone."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return None
