"""How the processes of a run find each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta


def connect(backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed from torchrun's environment. Blocks until all processes are there.

    On one machine (MASTER_ADDR is the loopback and torchrun holds no store of its own) the store listens on the
    loopback only. torch would let it listen on every interface, where anybody may write.
    """
    import torch.distributed as dist

    address, rank, world_size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if address != "127.0.0.1" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    port = int(os.environ["MASTER_PORT"])
    listener = loopback_listener(port).detach() if rank == 0 else None  # the store closes it
    store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def loopback_listener(port: int) -> socket.socket:
    """A listening socket that other machines cannot reach. Port 0 picks a free one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    return listener
