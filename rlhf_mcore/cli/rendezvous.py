"""How the processes of a run find each other, on one machine or on several."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from datetime import timedelta

from rlhf_mcore.config.errors import ConfigError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


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


def listener(address: str, port: int = 0) -> socket.socket:
    """A listening socket on one address of this machine: other interfaces do not reach it. Port 0 picks a free one."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((address, port))
    made.listen()
    return made


def free_port(address: str) -> int:
    """A port of this machine that nobody listens on now."""
    with listener(address) as made:
        return int(made.getsockname()[1])


def source_address(peer: str) -> str:
    """This machine's address on the way to ``peer``, an IPv4 address or a name. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(peer), 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the interface that has an address.

    Raises:
        ValueError: no interface of this machine has it.
    """
    addresses = interface_addresses()
    for name, found in addresses.items():
        if found == address:
            return name
    raise ValueError(f"no interface of {socket.gethostname()} has the address {address}; there are {addresses}")


def interface_addresses() -> dict[str, str]:
    """Names and IPv4 addresses of this machine's interfaces."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found
