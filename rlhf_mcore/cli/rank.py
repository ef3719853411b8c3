"""A process that the supervisor or torchrun has started: its setup, its connection to the other ranks, and the report of its end."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability import rank_file
from rlhf_mcore.observability.rank_file import Watchdog
from rlhf_mcore.own_processes import end_with_parent, raise_open_files
from rlhf_mcore.parallel.addresses import LOOPBACK, listener

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config
    from rlhf_mcore.platform import Platform

DUMP_STACKS = signal.SIGQUIT


def torchrun_world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of processes of the torchrun that started this one, or None without torchrun.

    Raises:
        ConfigError: ``RANK`` is set, but other variables of torchrun are missing or invalid; the message names each of them.
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
    """Run ``main`` of a module that the supervisor or torchrun starts. Returns the exit code.

    The process ends with the process that started it. Ctrl-C ends it at once until the run installs its own handler.
    ``DUMP_STACKS`` prints the stacks of all threads. Every exception becomes a message (``terminal.report``).
    """
    try:
        if torchrun_world_size() is None:
            return main()
    except ConfigError as error:
        return terminal.report(error)
    end_with_parent(signal.SIGKILL)
    raise_open_files()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the locale cannot encode must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGINT, _end_at_once)
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS, chain=False)
    rank_file.note_start()
    try:
        code = main()
    except Exception as error:
        code = terminal.report(error)
    if code == terminal.DONE:
        rank_file.note_done()
    _flush(code)
    return code


@contextmanager
def forbid_early_exit() -> Iterator[None]:
    """Turn a ``sys.exit`` in code that the run calls into an error, because a run that ends early must not look finished.

    Raises:
        EarlyExit: instead of SystemExit.
    """
    try:
        yield
    except SystemExit as error:
        raise EarlyExit(f"the run was ended in the middle by sys.exit({error.code!r})") from error


@dataclass(frozen=True, slots=True)
class Process:
    """A connected rank: its device, and the watchdog that ends it if it makes no progress."""

    platform: Platform
    watchdog: Watchdog


@contextmanager
def join_world(cfg: Config, collective_timeout: timedelta) -> Iterator[Process]:
    """Claim the device and connect to the other ranks for the duration of the block. Collective over the world."""
    import torch.distributed as dist

    from rlhf_mcore.parallel.joint_group import connect_device
    from rlhf_mcore.platform import current_platform

    if cfg.actor.fp8 is not None:  # Transformer Engine reads the variable on import
        os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"
    platform = current_platform()
    platform.setup_process(int(os.environ["LOCAL_RANK"]), cfg.trainer.threads_per_rank, cfg.deterministic)
    if cfg.trainer.bind_numa == "auto":
        platform.bind_to_node()
    if cfg.deterministic and os.environ["RANK"] == "0" and (reason := platform.varying()):
        say(f"warning: deterministic=true: {reason}", file=sys.stderr)
    connect(platform.collective_backend, collective_timeout)
    gc.freeze()  # imported objects live as long as the process, so garbage collections during a step can skip them
    try:
        with Watchdog(cfg.trainer.watchdog_s) as watchdog:
            connect_device()  # before an engine measures the free memory
            yield Process(platform, watchdog)
    finally:
        dist.destroy_process_group()


def connect(backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed from torchrun's environment. Blocks until all processes are connected.

    On one machine (MASTER_ADDR is the loopback and torchrun has no store) the store listens on the loopback only. torch's default
    store would listen on every interface, and anyone on the network could write to it.

    Raises:
        ConfigError: the processes cannot connect; the message names the variables with the address.
    """
    import torch.distributed as dist

    address, rank, world_size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    try:
        if world_size == 1:  # no port is needed
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
            return
        if address != LOOPBACK or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            socket.getaddrinfo(address, port)  # fails at once for a wrong name; torch would retry it until the timeout
            dist.init_process_group(backend, timeout=timeout)
            return
        listening = listener(LOOPBACK, port).detach() if rank == 0 else None  # the store closes it
        store = dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (OSError, UnicodeError, dist.DistError) as error:  # UnicodeError: not a valid host name
        raise ConfigError(
            f"rank {rank} of WORLD_SIZE={world_size} cannot connect to the other ranks at MASTER_ADDR={address} MASTER_PORT={port} "
            f"({str(error).splitlines()[0]}); check these variables, and that {world_size} processes were started"
        ) from error


class EarlyExit(RuntimeError):
    """Code that a run calls has called ``sys.exit``."""


def _end_at_once(_number: int, _frame: FrameType | None) -> None:
    if os.environ["RANK"] == "0" and not rank_file.is_read():
        os.write(2, b"interrupted: ended before the first step; there was nothing to save\n")
    os._exit(terminal.INTERRUPTED)


def _flush(code: int) -> None:
    """Flush stdout and stderr, and keep the exit code: Python would exit with 120 if stderr is a file on a full disk."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os._exit(code)
