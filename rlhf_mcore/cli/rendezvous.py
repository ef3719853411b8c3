"""Connect the processes of a run: the nodes by a rendezvous of torchrun, then the ranks by ``connect``.

Both stores listen on one address only. The stores of torch and torchrun listen on every interface, and torchrun's default
rendezvous unpickles the data that it receives there.
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
TIMEOUT_S = 300  # for all nodes to connect
PASSED_S = 3  # for all nodes to pass the last barrier


def connect(backend: str, timeout: timedelta) -> None:
    """Initialise torch.distributed from torchrun's environment. Blocks until all processes are connected.

    On one machine (MASTER_ADDR is the loopback and torchrun has no store) the store listens on the loopback only. torch's default
    store would listen on every interface, and anyone on the network could write to it.

    Raises:
        ConfigError: the processes cannot connect; the message names the variables with the address.
    """
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


class RendezvousError(Exception):
    """The nodes cannot connect; the message gives the reason. ``code`` is the exit code."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class BoundRendezvous(StaticTCPRendezvous):
    """Torch's static rendezvous over our own store. For port 0 the first node chooses a free port.

    Raises:
        RendezvousError: the port is not available, or the other nodes have not connected in time.
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
                f"node {rank} of {num_nodes} cannot connect to the other nodes at {address}:{port} ({reason})"
            ) from error

    def shutdown(self) -> bool:
        """Keep the store of the first node until the other nodes have passed torchrun's last barrier, which reads the store.

        The first node passes the barrier first. Without this wait the others would print a traceback of the closed store.
        """
        assert self._store is not None
        names = [f"{NAME}/passed/{rank}" for rank in range(1, self.world_size)]
        with suppress(DistError):  # another node has failed; the launcher reports it
            if self.rank:
                self._store.set(names[self.rank - 1], "")
            elif names:
                self._store.wait(names, timedelta(seconds=PASSED_S))
        return True

    def get_backend(self) -> str:
        """Return the name of this backend in torchrun."""
        return NAME


def _listen(address: str, port: int) -> socket.socket:
    try:
        return listener(address, port)
    except OSError as error:
        code = PORT_TAKEN if error.errno == errno.EADDRINUSE else FAILED
        raise RendezvousError(f"the nodes cannot meet at {address}:{port} ({error.strerror})", code) from error


def register() -> None:
    """Register ``--rdzv-backend=bound --rdzv-conf=rank=N`` with torchrun in this process."""
    rendezvous_handler_registry.register(NAME, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    rank = parameters.get_as_int("rank")
    assert rank is not None and (port > 0 or parameters.max_nodes == 1), "the agent has given both"
    return BoundRendezvous(address, port, rank, parameters.max_nodes, parameters.run_id)
