"""Process groups across worlds: the trainer's ranks are one world, those of an engine another.

torch makes groups only inside a world (``new_group``), so this file makes one as ``init_process_group`` does, from a store of its
own, and enters it in torch's tables. All functions of ``torch.distributed`` then take it as any other group. It uses private parts
of torch, which are the same in 2.11 to 2.13; tests/unit/parallel/test_joint_group.py fails if they change.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlhf_mcore.parallel.addresses import interface_of, source_address
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.platform import current_platform
from rlhf_mcore.protocols import GroupSpec, PeersLost

_BREAK_TAG = (1 << 31) - 1  # the tag of a message that nobody sends
# Parts of gloo's and NCCL's messages about connections; their errors have no class of their own.
_CONNECTION = ("gloo/", "pair closure", "NCCL", "Connection", "Socket Timeout", "wait timeout")


class JointGroup:
    """A group from joining to leaving it. ``group`` is the argument for functions of ``torch.distributed``.

    Its members have group ranks only (``group_src=``, ``group.rank()``): no world numbers them all.
    """

    def __init__(self, spec: GroupSpec, listening: socket.socket | None = None) -> None:
        """Join the others. Collective over all processes with a specification of the same name.

        Args:
            spec: this process's specification.
            listening: on rank 0 the socket at the address and port of all specifications, see ``addresses.listener``. The group owns
                it from now on.

        Raises:
            PeersLost: the others do not arrive within ``spec.timeout_s``, do not connect within as long again, or one is lost.
        """
        assert (listening is not None) == (spec.rank == 0), "rank 0 has the store"
        limit = timedelta(seconds=spec.timeout_s)
        with connections():
            self._store: dist.Store | None = dist.TCPStore(
                spec.address,
                spec.port,
                is_master=listening is not None,
                timeout=limit,
                wait_for_workers=False,
                # The store closes it.
                master_listen_fd=None if listening is None else listening.detach(),
            )
            # Wait until all have arrived, so that no rank waits for a connection to one that never does.
            if self._store.add(f"{spec.name}/arrived", 1) == spec.world_size:
                self._store.set(f"{spec.name}/complete", "")
            self._store.wait([f"{spec.name}/complete"], limit)
            self.group = _build_group(self._store, spec, limit)
            try:
                connect_device(self.group, spec.timeout_s)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Leave the group. The connections are closed, even if the group is still referenced, so others stop waiting for this rank."""
        if self._store is None:
            return
        self._store = None
        if self.group.size() > 1:
            # gloo has no call that closes a group's connections, but an operation that runs out of time does.
            peer = (self.group.rank() + 1) % self.group.size()
            with suppress(RuntimeError):
                self.group.recv([torch.empty(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))
        if "cuda" in current_platform().collective_backend:
            with suppress(RuntimeError):
                self.group.abort()
        dist.destroy_process_group(self.group)


@contextmanager
def connections() -> Iterator[None]:
    """Raise errors of connections to other ranks as PeersLost."""
    try:
        yield
    except RuntimeError as error:
        is_plain = type(error) is RuntimeError and any(word in str(error) for word in _CONNECTION)
        if is_plain or isinstance(error, dist.DistError):
            raise PeersLost(str(error).partition("\n")[0]) from error
        raise


def _build_group(store: dist.Store, spec: GroupSpec, limit: timedelta) -> dist.ProcessGroup:
    backend = current_platform().collective_backend
    # By default gloo listens at the address of the host's name.
    settings = {"GLOO_SOCKET_IFNAME": interface_of(source_address(spec.address))}
    if "nccl" in backend:
        # An operation that runs out of time has to raise instead of ending the process.
        settings |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with _set_environment(settings):
        # torch has a type of its own for names.
        name: Any = spec.name
        group, _ = c10d._new_process_group_helper(spec.world_size, spec.rank, [], backend, store, name, timeout=limit)
    # torch translates between ranks of a group and of the world. Members of other worlds get numbers after those of this one.
    own, others = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (spec.rank, spec.world_size)
    numbers = {others + rank: rank for rank in range(spec.world_size) if rank != spec.rank}
    c10d._world.pg_group_ranks[group] = {own: spec.rank, **numbers}
    return group


@contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    changed = {name: value for name, value in values.items() if before[name] != value}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            if (value := before[name]) is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def connect_device(group: dist.ProcessGroup | None = None, limit_s: float | None = None) -> None:
    """Sum one number on the devices of all ranks of a group. Collective.

    NCCL connects a group in its first operation, in which it waits for every rank. If that were a message between some of the ranks,
    it would wait forever for the others. The connections' memory is allocated here too, so later measurements of free memory see it.

    Args:
        group: None: all ranks of the world.
        limit_s: seconds to wait for the others; None: as long as the group does. While NCCL connects, a timeout of the group does
            not apply, and torch no longer chooses NCCL's non-blocking mode, which hangs in some versions (pytorch issue 153960).
            So a thread connects, and is abandoned after ``limit_s``.

    Raises:
        PeersLost: the others are late.
    """
    size = (group or world_group()).size()
    # With an index, since each thread has its own current device.
    total = torch.ones(1, device=current_platform().device())

    def connect() -> None:
        dist.all_reduce(total, group=group)
        # Reading it waits for the device.
        assert int(total) == size, f"{int(total)} of {size} ranks"

    if limit_s is None:
        connect()
        return
    outcome: Future[None] = Future()

    def report() -> None:
        try:
            connect()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    thread = threading.Thread(target=report, name="connect", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not outcome.done():
        raise PeersLost(f"the devices of {size} ranks are not connected after {limit_s:g} s")
    outcome.result()
