"""How the processes of a run find each other, on one machine or on several."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from datetime import timedelta

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def connect(backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed from torchrun's environment. Blocks until all processes are there.

    On one machine (MASTER_ADDR is the loopback and torchrun holds no store of its own) the store listens on the
    loopback only. torch would let it listen on every interface, where anybody may write.
    """
    import torch.distributed as dist

    address, rank, world_size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if address != LOOPBACK or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    port = int(os.environ["MASTER_PORT"])
    listening = listener(LOOPBACK, port).detach() if rank == 0 else None  # the store closes it
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listening)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


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
