"""Where the processes of a run meet: the ranks (``connect``), and before them the nodes (a rendezvous of torchrun).

Both stores listen on one address only. torch's and torchrun's own listen on every interface, and torchrun's default one unpickles what
it finds there.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rlhf_mcore.cli.exit_codes import FAILED, PORT_TAKEN
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.parallel.addresses import LOOPBACK, listener

NAME = "bound"
TIMEOUT_S = 300  # for all nodes to arrive
PASSED_S = 3  # for all to pass the last barrier


def connect(backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed from torchrun's environment. Blocks until all processes are there.

    On one machine (MASTER_ADDR is the loopback and torchrun holds no store of its own) the store listens on the
    loopback only. torch would let it listen on every interface, where anybody may write.

    Raises:
        ConfigError: the processes do not find each other; the variables that define where they meet are named.
    """
    address, rank, world_size = os.environ["MASTER_ADDR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    try:
        if world_size == 1:  # nobody else is met: no port is opened
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
            return
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


class RendezvousError(Exception):
    """The nodes do not meet; the message says why. ``code`` is the exit code for it."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class BoundRendezvous(StaticTCPRendezvous):
    """Torch's static rendezvous over a store that we have opened. Port 0 of the first node is one that is free.

    Raises:
        RendezvousError: the port cannot be had, or the others have not come.
    """

    def __init__(self, address: str, port: int, rank: int, num_nodes: int, run_id: str) -> None:
        opened = _listen(address, port) if rank == 0 else None
        if opened is not None:
            port = opened.getsockname()[1]
        super().__init__(address, port, rank, num_nodes, run_id, TIMEOUT_S)
        listening = None if opened is None else opened.detach()  # the store closes it
        try:
            self._store = TCPStore(
                address,
                port,
                num_nodes,
                is_master=rank == 0,
                timeout=timedelta(seconds=TIMEOUT_S),
                master_listen_fd=listening,
            )
        except DistError as error:
            reason = str(error).partition("\n")[0]
            raise RendezvousError(
                f"node {rank} of {num_nodes} does not meet the others at {address}:{port} ({reason})"
            ) from error

    def shutdown(self) -> bool:
        """Keep the store of the first node until the others have passed torchrun's last barrier, which reads from it.

        The first node passes it first, and the others would print the traceback of a store that is gone.
        """
        assert self._store is not None
        names = [f"{NAME}/passed/{rank}" for rank in range(1, self.world_size)]
        with suppress(DistError):  # another node has failed: the launcher tells of it
            if self.rank:
                self._store.set(names[self.rank - 1], "")
            elif names:
                self._store.wait(names, timedelta(seconds=PASSED_S))
        return True

    def get_backend(self) -> str:
        """Return the name by which torchrun knows it."""
        return NAME


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listener(address, port)
    except OSError as error:
        code = PORT_TAKEN if error.errno == errno.EADDRINUSE else FAILED
        raise RendezvousError(f"the nodes cannot meet at {address}:{port} ({error.strerror})", code) from error


def register() -> None:
    """Make ``--rdzv-backend=bound --rdzv-conf=rank=N`` known to torchrun in this process."""
    rendezvous_handler_registry.register(NAME, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    rank = parameters.get_as_int("rank")
    assert rank is not None and (port > 0 or parameters.max_nodes == 1), "the agent has given both"
    return BoundRendezvous(address, port, rank, parameters.max_nodes, parameters.run_id)
