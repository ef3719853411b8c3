"""Checks before any process is started, which take well under a second: run directory, progress, packages and free memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import rlhf_mcore
from rlhf_mcore.checkpoint.config_changes import compare_configs, refuse
from rlhf_mcore.checkpoint.housekeeping import best_rule, find_best
from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.terminal import find_console, working
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.engine_kinds import ENGINES, engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.questions import max_new_tokens
from rlhf_mcore.config.rules.rollout import engine_keys
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.run import NEVER
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.environments.sessions import check_loads, worker_settings
from rlhf_mcore.foreign import SMALL, read_bytes, read_text, shorten
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.machine import count_gpus, has_driver, has_gpu, is_torch_for_cpu, memory_bytes
from rlhf_mcore.observability.files import (
    FullDiskError,
    free_bytes,
    json_line,
    keep_steps,
    pretty_json,
    write_atomically,
)
from rlhf_mcore.observability.run_directory import LOCK, MAX_METRICS_BYTES, METRICS, DirectoryLock, RunDirectory
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.planning.inputs import engine_grid
from rlhf_mcore.readers.model_files import inspect_model, read_config
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.redaction import redact_arguments

LAUNCH_LOCK = "launch.lock"  # locked while a launcher of the run is alive
KEPT_STARTS = 20  # number of starts whose logs are kept
_STAMP = re.compile(
    r"(\d{8}-\d{6})(?:\.(\d+))?"
)  # directory name of a start's logs; further starts in the same second add a number
RANK_BYTES = 200 * 2**20  # a low estimate for a rank after its imports


def check_packages(cfg: Config) -> None:
    """Check that the packages that the configuration needs are installed.

    Raises:
        ConfigError: a package is missing; the message names the key, the package and the command that installs it.
    """
    if cfg.actor.fp8 is not None and (problem := _fp8_problem(cfg)) is not None:
        raise ConfigError(problem)
    for role in ("actor", "critic"):
        in_bf16 = value_of(cfg, f"{role}.optimizer.state_dtype") == "bf16" and run_kind(cfg).reads(f"{role}.optimizer")
        if in_bf16 and find_spec("transformer_engine") is None:
            raise ConfigError(
                f"{role}.optimizer.state_dtype=bf16 needs Transformer Engine, which is not installed; set it to fp32, and save "
                f"memory with {role}.optimizer.offload"
            )
    rollout, stack = cfg.rollout, "gpu" if has_gpu() else "cpu"
    without = next(f"rollout.engine={kind.name}" for kind in ENGINES.values() if not kind.packages)
    requirements = [
        *(
            (True, f"rollout.engine={rollout.engine}", name, stack, without)
            for name in engine_kind(rollout.engine).packages
        ),
        (
            rollout.placement == "disaggregated",
            "rollout.placement=disaggregated",
            "ray",
            "ray",
            "rollout.placement=colocated",
        ),
        (cfg.reward.pool != "local", f"reward.pool={cfg.reward.pool}", "ray", "ray", "reward.pool=local"),
    ]
    for is_wanted, setting, package, extra, instead in requirements if run_kind(cfg).generates else []:
        if is_wanted and find_spec(package) is None:
            raise ConfigError(
                f"{setting} needs {package}, which is not installed: pip install 'rlhf_mcore[{extra}]', or set {instead}"
            )


def _fp8_problem(cfg: Config) -> str | None:
    """Return a missing requirement of this machine for FP8 products, or None. CUDA is not loaded."""
    if not has_gpu():
        lacks = "GPUs of compute capability 9.0 (H100, H200), and this machine has none"
    elif find_spec("transformer_engine") is None:
        lacks = "Transformer Engine, which is not installed: use NVIDIA's PyTorch container (Dockerfile)"
    else:
        return None
    return f"actor.fp8={cfg.actor.fp8} needs {lacks}; or set it to null"


def check_engine(cfg: Config) -> None:
    """Check that the engine is installed and supports the model here. On a CPU its KV cache must hold a prompt and a response.

    Raises:
        ConfigError: a package is missing, the engine does not support the model, or the cache is too small.
    """
    check_packages(cfg)
    run, engine = run_kind(cfg), engine_kind(cfg.rollout.engine)
    geometry = inspect_model(cfg.model.path, "model.path", run.starting_heads)[0] if run.generates else None
    if geometry is None:
        return
    records_routes = cfg.actor.router_replay == "rollout"
    for problem in engine.model_problems(cfg.rollout, cfg.model, geometry, records_routes=records_routes):
        raise ConfigError(problem)
    if engine.reserves_cache and not has_gpu():
        _check_cache(cfg, geometry)


def _check_cache(cfg: Config, geometry: ModelGeometry) -> None:
    """Check that an engine's KV cache on a CPU holds the longest prompt and response.

    Models with sliding-window attention, delta nets or state spaces need less, and are not checked.

    Raises:
        ConfigError: the cache is too small.
    """
    from rlhf_mcore.planning.engines import kv_bytes_per_token  # imports numpy

    hf_config = read_config(cfg.model.path, "model.path")
    has_windows = hf_config.content.get("sliding_window") is not None and hf_config.content.get(
        "use_sliding_window", True
    )
    if has_windows or geometry.recurrent_part is not None:
        return
    width = 2 if cfg.model.dtype in ("bf16", "fp16") else 4
    tokens = cfg.rollout.max_model_len or cfg.data.max_prompt_tokens + max_new_tokens(cfg)
    needed = tokens * kv_bytes_per_token(geometry, engine_grid(cfg), width) / 2**30
    if needed > cfg.rollout.kv_cache_gib:
        raise ConfigError(
            f"rollout.kv_cache_gib={cfg.rollout.kv_cache_gib:g}: the cache of an engine does not hold one prompt and response of "
            f"rollout.max_model_len={tokens} tokens, which take {needed:.3g} GiB; raise it, or lower data.max_prompt_tokens or "
            "rollout.sampling.max_new_tokens"
        )


@contextmanager
def take_directory(cfg: Config) -> Iterator[Path]:
    """Lock the run directory against other launchers within the block, because the ranks lock it only after they have started.

    Raises:
        ConfigError: the directory cannot be written, or is in use.
    """
    directory = RunDirectory.create(cfg.output_dir, cfg.project, cfg.experiment)
    directory.close()
    with closing(DirectoryLock(directory.path / LAUNCH_LOCK, "change experiment or output_dir")):
        yield directory.path


def announce(cfg: Config, directory: Path) -> int | None:
    """Print the step that the run continues after, if its directory contains a checkpoint.

    Returns the printed step, 0 if nothing was printed, or None if the run is finished (which is printed).

    Raises:
        ConfigError: the newest checkpoint does not fit the configuration, or an input such as the reward has changed.
    """
    own, resume = scan(directory), cfg.checkpoint.resume
    if not own or resume == NEVER or Path(resume).resolve().parent == directory:
        return 0
    from rlhf_mcore.checkpoint.delta import verify_chain
    from rlhf_mcore.trainer.inputs import fingerprints
    from rlhf_mcore.trainer.resume import compare_inputs  # imports torch
    from rlhf_mcore.trainer.run_state import read_inputs

    newest = own[-1]
    try:
        saved = read_text(newest.path / "config.yaml", limit=SMALL.num_bytes, remedy="choose another checkpoint")
        fixed, _ = compare_configs(saved, to_yaml(cfg), by_content=["data.train"])
        damaged = any(problem.is_damage for problem in verify_chain(newest.path, hashes=False))
        if not damaged:
            read_inputs(newest.path)
    except ConfigError:  # the ranks report the error, or choose another checkpoint
        return 0
    refuse(newest.path, fixed)
    if damaged:
        return 0
    compare_inputs(newest.path, cfg.checkpoint, fingerprints(cfg))
    if is_over(cfg, directory, newest.step):
        say(cfg, finished_text(cfg, newest.path, newest.step))
        return None
    say(cfg, continues_text(cfg, newest.path, newest.step))
    return newest.step


def say(cfg: Config, text: str) -> None:
    """Print a text of the launcher in the format of ``logging.console``."""
    if cfg.logging.console == "json":
        text = json_line({"note": text}).decode("utf-8").rstrip()
    if cfg.logging.console != "off":
        terminal.say(text)


@contextmanager
def remove_empty_directory(cfg: Config, *, is_kept: bool = True) -> Iterator[None]:
    """Remove an empty run directory that this start has created, if the block fails or is interrupted, or if not ``is_kept``."""
    path = cfg.run_directory.resolve()
    folders = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        is_kept = False
        raise
    finally:
        with suppress(OSError):
            if folders and not is_kept and {file.name for file in path.iterdir()} <= {LOCK, LAUNCH_LOCK}:
                for file in path.iterdir():
                    file.unlink()
                for folder in folders:
                    folder.rmdir()


def check_environment(cfg: Config) -> None:
    """Load the environment with ``load_environment``, and prepare the images of containers."""
    if cfg.environment.function is not None:
        with working("loading the environment", console=find_console(cfg.logging.console)):
            load_environment(cfg)
    if cfg.environment.container.kind is not None:
        from rlhf_mcore.environments.build import warm_containers

        with working("preparing the containers", console=find_console(cfg.logging.console)):
            warm_containers(cfg.environment, cfg.data)


def load_environment(cfg: Config) -> None:
    """Load the environment, if the run has one, once in a separate process.

    Raises:
        ConfigError: it cannot be loaded; the message names ``environment.function``, its options or ``environment.tool_parser``.
    """
    if cfg.environment.function is None:
        return
    if cfg.environment.tool_parser is not None:
        from rlhf_mcore.rollout.vllm.tool_calls import check_tool_parser  # imports torch

        check_tool_parser(cfg.environment.tool_parser)
    if isinstance(cfg.rollout.function, OwnFunction):
        from rlhf_mcore.environments.function_worker import load_rollout  # imports torch

        load_rollout(cfg.rollout.function)
    else:
        check_loads(worker_settings(cfg, loads_only=True))


def check_world(world_size: int, name: str = "trainer.world_size") -> None:
    """Check that this machine can start ``world_size`` processes.

    Raises:
        ConfigError: the free memory is too small for these processes, even before they build models.
    """
    free = memory_bytes().get("MemAvailable") or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(free // RANK_BYTES, 1)
    if world_size > most:
        raise ConfigError(
            f"{name}={shorten(str(world_size))}: this machine has {free / 2**30:.0f} GiB of free memory, enough for {most} processes "
            f"of {RANK_BYTES >> 20} MiB each (without a model); lower it (or the layouts that it follows from), or start "
            "the run on several machines (docs/scale/cluster.md)"
        )


def check_devices(cfg: Config, world_size: int) -> None:
    """Check that there is a GPU for each process of this machine, and warn if the run does not use the GPUs.

    Raises:
        ConfigError: there are fewer GPUs than processes.
    """
    if not has_gpu():
        if has_driver() and is_torch_for_cpu():
            say(
                cfg,
                "warning: this machine has a GPU, but the installed torch is built for CPUs, so the run uses the CPU; use the image "
                "of Dockerfile (docs/get-started/install.md#images), or a Python with torch for CUDA",
            )
        return
    rollout, ranks = cfg.rollout, {"trainer.world_size": world_size}
    if run_kind(cfg).generates and rollout.placement == "disaggregated" and rollout.ray.address is None:
        ranks[f"rollout.num_engines x {engine_keys(rollout.layout)}"] = rollout.num_engines * rollout.layout.num_ranks
    gpus = count_gpus()
    if gpus is None or sum(ranks.values()) <= gpus:
        return
    layouts = " and ".join(f"{name}={number}" for name, number in ranks.items())
    raise ConfigError(
        f"{layouts}: this machine has {gpus} GPU{'s' * (gpus != 1)}, and each process takes one; lower it (or the layouts that it "
        "follows from), or start the run on several machines (docs/scale/cluster.md)"
    )


def logs_directory(cfg: Config) -> Path:
    """Create ``<run directory>/logs/<time>`` for the logs of a start, with ``launch.json``: command, host, time and versions.

    The logs of the newest ``KEPT_STARTS`` starts, including this start, are kept.

    Raises:
        ConfigError: the directory cannot be written.
    """
    logs = cfg.run_directory.resolve() / "logs"
    _prune(logs)
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    try:
        names = (stamp if number == 1 else f"{stamp}.{number}" for number in count(1))
        directory = next(logs / name for name in names if not (logs / name).exists())
        directory.mkdir(parents=True)
        write_atomically(directory / "launch.json", pretty_json(_launch_record(now)))
    except OSError as error:
        free = free_bytes(next(folder for folder in logs.parents if folder.is_dir()))
        room = f"; {free:,} bytes are free" if free is not None and not isinstance(error, FullDiskError) else ""
        raise ConfigError(
            f"output_dir={cfg.output_dir!r}: cannot write to {logs} ({error.strerror}{room}); choose another, or make room"
        ) from error
    return directory


def _prune(logs: Path) -> None:
    """Remove the logs of the oldest starts. Other files, and files that cannot be removed, stay."""
    with suppress(OSError):
        starts = [(match, path) for path in logs.iterdir() if (match := _STAMP.fullmatch(path.name))]
        old = sorted(starts, key=lambda each: (each[0][1], int(each[0][2] or 1)))[: -(KEPT_STARTS - 1)]
        for _, path in old:
            shutil.rmtree(path, ignore_errors=True)  # it does not follow a link


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
    """Return the commit of this package, with ``-dirty`` if files differ from it; None outside of a clone."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return None


def is_over(cfg: Config, run: Path, step: int) -> bool:
    """Return whether the run is finished after ``step``, the step of the newest checkpoint.

    A run with ``checkpoint.load_best_model_at_end`` must still evaluate its best model after the last step.
    """
    if step != cfg.trainer.num_steps or not cfg.checkpoint.load_best_model_at_end:
        return step >= cfg.trainer.num_steps
    rule = best_rule(cfg.checkpoint)
    best = find_best(scan(run), rule) if rule is not None else None
    if best is None or best.step == step:
        return True
    metrics = run / METRICS
    data = read_bytes(metrics, limit=MAX_METRICS_BYTES, remedy="move it away") if metrics.is_file() else b""
    lines = keep_steps(data, step).splitlines()
    return any(json.loads(line).get("final/step") == best.step for line in lines)


def continues_text(cfg: Config, checkpoint: Path, step: int) -> str:
    """Return the message for a run that continues."""
    where = f"step {step} of {cfg.trainer.num_steps}" if step < cfg.trainer.num_steps else "its last step"
    return f"the run continues after {where}, from {shown_path(checkpoint)}"


def finished_text(cfg: Config, checkpoint: Path, step: int) -> str:
    """Return the message for a finished run that is started again."""
    return (
        f"this run is finished: {step} steps were made, and trainer.num_steps={cfg.trainer.num_steps}\n"
        f"trained model   {shown_path(checkpoint / run_kind(cfg).saved_as)}\n"
        "raise trainer.num_steps (or num_epochs) to train on, or choose another experiment"
    )
