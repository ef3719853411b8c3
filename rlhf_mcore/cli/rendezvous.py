"""Connect the processes of a run, on one machine or on several."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from rlhf_mcore.config.errors import ConfigError


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


def connect(backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed from torchrun's environment. Blocks until all processes are there.

    On one machine (MASTER_ADDR is the loopback and torchrun holds no store of its own) the store listens on the
    loopback only. torch would let it listen on every interface, where anybody may write.

    Raises:
        ConfigError: the processes do not find each other; the variables that define where they meet are named.
    """
    import torch.distributed as dist

    address, rank, world_size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    try:
        if world_size == 1:  # nobody else is met: no port is opened
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
            return
        from rlhf_mcore.parallel.addresses import LOOPBACK, listener

        if address != LOOPBACK or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            socket.getaddrinfo(address, port)  # torch would ask for the name until its timeout
            dist.init_process_group(backend, timeout=timeout)
            return
        listening = listener(LOOPBACK, port).detach() if rank == 0 else None  # the store closes it
        store = dist.TCPStore(
            address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening
        )
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (OSError, UnicodeError, dist.DistError) as error:  # UnicodeError: no name of a host
        raise ConfigError(
            f"rank {rank} of WORLD_SIZE={world_size} does not meet the others at MASTER_ADDR={address} MASTER_PORT={port} "
            f"({str(error).splitlines()[0]}); check these variables, and that so many processes were started"
        ) from error
