"""A process that torchrun has started: how it begins, and that it does not end unnoticed."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability import rank_file
from rlhf_mcore.own_processes import end_with_parent, raise_open_files

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config
    from rlhf_mcore.observability.watchdog import Watchdog
    from rlhf_mcore.platform import Platform

DUMP_STACKS = signal.SIGQUIT


def torchrun_world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Number of processes of the torchrun that started this one, or None without torchrun.

    Raises:
        ConfigError: ``RANK`` is set and what torchrun sets beside it is missing or wrong; each variable is named.
    """
    if "RANK" not in environment:
        return None
    problems = [
        f"RANK={environment['RANK']} is set, so this is one of several processes, but {name} is not set; start it with torchrun, "
        "or unset RANK"
        for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if name not in environment
    ]
    numbers: dict[str, int] = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        try:
            numbers[name] = int(environment.get(name, "1"))
        except ValueError:
            problems.append(f"{name}={environment[name]!r} is not a whole number; torchrun sets it")
    if not problems:
        world_size = numbers["WORLD_SIZE"]
        if not 0 <= numbers["RANK"] < world_size or not 0 <= numbers["LOCAL_RANK"] < world_size:
            problems.append(
                f"RANK={numbers['RANK']} and LOCAL_RANK={numbers['LOCAL_RANK']} must be between 0 and WORLD_SIZE={world_size} - 1; "
                "torchrun sets all three"
            )
        if not 0 < numbers["MASTER_PORT"] < 65536:
            problems.append(f"MASTER_PORT={numbers['MASTER_PORT']} is not a port; use one from 1 to 65535")
    if problems:
        raise ConfigError.many(problems)
    return numbers["WORLD_SIZE"]


def run(main: Callable[[], int]) -> int:
    """Run ``main`` of a module that torchrun starts. Returns the exit code.

    The process ends with torchrun's agent, Ctrl-C ends it at once until the run handles it, ``DUMP_STACKS`` prints the stacks of all
    threads, and whatever is raised becomes a message (``exit_codes.report``).
    """
    try:
        if torchrun_world_size() is None:
            return main()
    except ConfigError as error:
        return exit_codes.report(error)
    end_with_parent(signal.SIGKILL)
    raise_open_files()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that the locale does not have must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGINT, _end_at_once)
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, chain=False)
    rank_file.note_start()
    try:
        code = main()
    except Exception as error:
        code = exit_codes.report(error)
    if code == exit_codes.DONE:
        rank_file.note_done()
    _flush(code)
    return code


@contextmanager
def forbid_early_exit() -> Iterator[None]:
    """Make an error of a ``sys.exit`` in somebody's code: a run that ends early must not look finished.

    Raises:
        EarlyExit: in its place.
    """
    try:
        yield
    except SystemExit as error:
        raise EarlyExit(f"the run was ended in the middle by sys.exit({error.code!r})") from error


@dataclass(frozen=True, slots=True)
class Process:
    """A rank that has met the others: its device, and the watchdog that ends it when it stands still."""

    platform: Platform
    watchdog: Watchdog


@contextmanager
def join_world(cfg: Config, collective_timeout: timedelta) -> Iterator[Process]:
    """Claim the device and meet the other ranks, which leave each other at the end of the block. Collective over the world."""
    import torch.distributed as dist

    from rlhf_mcore.cli.rendezvous import connect
    from rlhf_mcore.observability.watchdog import Watchdog
    from rlhf_mcore.parallel.joint_group import connect_device
    from rlhf_mcore.platform import current_platform

    if cfg.actor.fp8 is not None:  # Transformer Engine reads it where it is imported
        os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
    platform = current_platform()
    platform.setup_process(int(os.environ["LOCAL_RANK"]), cfg.trainer.threads_per_rank, cfg.deterministic)
    if cfg.trainer.bind_numa == "auto":
        platform.bind_to_node()
    if cfg.deterministic and os.environ["RANK"] == "0" and (reason := platform.varying()):
        say(f"warning: deterministic=true: {reason}", file=sys.stderr)
    connect(platform.collective_backend, collective_timeout)
    gc.freeze()  # what is imported lives as long as the process: no collection in the middle of a step looks at it
    try:
        with Watchdog(cfg.trainer.watchdog_s) as watchdog:
            connect_device()  # before an engine measures how much memory is free
            yield Process(platform, watchdog)
    finally:
        dist.destroy_process_group()


class EarlyExit(RuntimeError):
    """Code that a run calls has ended the process."""


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    if os.environ["RANK"] == "0" and not rank_file.is_read():
        os.write(2, b"interrupted: ended before the first step, nothing was to be saved\n")
    os._exit(exit_codes.INTERRUPTED)


def _flush(code: int) -> None:
    """Python would replace the exit code by 120 where standard error is a file on a full disk."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os._exit(code)
