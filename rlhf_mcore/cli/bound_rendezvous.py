"""A rendezvous of torchrun for a fixed set of nodes, whose store listens on one address of the first node only.

torchrun's own listen on every interface; its default one unpickles what it finds there.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rlhf_mcore.cli.exit_codes import FAILED, PORT_TAKEN
from rlhf_mcore.parallel.addresses import listener

NAME = "bound"
TIMEOUT_S = 300  # for all nodes to arrive
PASSED_S = 3  # for all to pass the last barrier


class NoMeeting(Exception):
    """The nodes do not meet; the message says why. ``code`` is the exit code for it."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class BoundRendezvous(StaticTCPRendezvous):
    """Torch's static rendezvous over a store that we have opened. Port 0 of the first node is one that is free.

    Raises:
        NoMeeting: the port cannot be had, or the others have not come.
    """

    def __init__(self, address: str, port: int, rank: int, num_nodes: int, run_id: str) -> None:
        listener = _listen(address, port) if rank == 0 else None
        if listener is not None:
            port = listener.getsockname()[1]
        super().__init__(address, port, rank, num_nodes, run_id, TIMEOUT_S)
        listening = None if listener is None else listener.detach()  # the store closes it
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
            raise NoMeeting(
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
        raise NoMeeting(f"the nodes cannot meet at {address}:{port} ({error.strerror})", code) from error


def register() -> None:
    """Make ``--rdzv-backend=bound --rdzv-conf=rank=N`` known to torchrun in this process."""
    rendezvous_handler_registry.register(NAME, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    rank = parameters.get_as_int("rank")
    assert rank is not None and (port > 0 or parameters.max_nodes == 1), "the agent has given both"
    return BoundRendezvous(address, port, rank, parameters.max_nodes, parameters.run_id)
