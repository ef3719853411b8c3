"""Process groups across worlds: the trainer's ranks form one world, an engine's ranks form another.

torch creates groups only within a world (``new_group``). This file therefore creates a group like
``init_process_group``, from a separate store, and registers it in torch's tables. All functions of
``torch.distributed`` then accept it. The file uses private parts of torch, which are equal in 2.11 to 2.13.
tests/unit/parallel/test_joint_group.py fails if they change.
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

_BREAK_TAG = (1 << 31) - 1  # the tag of a message that is never sent
# Parts of gloo's and NCCL's messages about connections. These errors have no class of their own.
_CONNECTION = ("gloo/", "pair closure", "NCCL", "Connection", "Socket Timeout", "wait timeout")


class JointGroup:
    """A group, from joining it to leaving it. Pass ``group`` to functions of ``torch.distributed``.

    Its members only have group ranks (``group_src=``, ``group.rank()``), because no world contains them all.
    """

    def __init__(self, spec: GroupSpec, listening: socket.socket | None = None) -> None:
        """Join the others. Collective over all processes with a specification of the same name.

        Args:
            spec: this process's specification.
            listening: on rank 0, a socket that listens at the address and port of all specifications (see
                ``addresses.listener``). The group takes ownership of it.

        Raises:
            PeersLost: the others do not arrive within ``spec.timeout_s``, do not connect within the same time again,
                or one is lost.
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
                # The store closes this socket.
                master_listen_fd=None if listening is None else listening.detach(),
            )
            # Wait until all have arrived, so that no rank waits for a connection to a rank that never arrives.
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
        """Leave the group and close its connections, even if it is still referenced.

        Other ranks then stop waiting for this one.
        """
        if self._store is None:
            return
        self._store = None
        if self.group.size() > 1:
            # gloo cannot close a group's connections directly, but an operation that times out closes them.
            peer = (self.group.rank() + 1) % self.group.size()
            with suppress(RuntimeError):
                self.group.recv([torch.empty(1)], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))
        if "cuda" in current_platform().collective_backend:
            with suppress(RuntimeError):
                self.group.abort()
        dist.destroy_process_group(self.group)


@contextmanager
def connections() -> Iterator[None]:
    """Raise connection errors of other ranks as PeersLost."""
    try:
        yield
    except RuntimeError as error:
        is_plain = type(error) is RuntimeError and any(word in str(error) for word in _CONNECTION)
        if is_plain or isinstance(error, dist.DistError):
            raise PeersLost(str(error).partition("\n")[0]) from error
        raise


def _build_group(store: dist.Store, spec: GroupSpec, limit: timedelta) -> dist.ProcessGroup:
    backend = current_platform().collective_backend
    # By default, gloo listens at the address of the host's name.
    settings = {"GLOO_SOCKET_IFNAME": interface_of(source_address(spec.address))}
    if "nccl" in backend:
        # An operation that times out must raise instead of killing the process.
        settings |= {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with _set_environment(settings):
        # torch has a separate type for names.
        name: Any = spec.name
        group, _ = c10d._new_process_group_helper(spec.world_size, spec.rank, [], backend, store, name, timeout=limit)
    # torch translates between ranks of a group and of the world. Members from other worlds get numbers after this
    # world's.
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

    NCCL connects a group in its first operation, which waits for every rank. If that operation were a message between
    some of the ranks, it would wait forever for the others. NCCL also allocates the memory for connections here, so
    later measurements of free memory include it.

    Args:
        group: None: all ranks of the world.
        limit_s: seconds to wait for the others; None: the timeout of the group. While NCCL connects, the group's
            timeout does not apply. torch no longer uses NCCL's non-blocking mode, because it hangs in some versions
            (pytorch issue 153960). The connection is therefore made in a thread, which is abandoned after
            ``limit_s``.

    Raises:
        PeersLost: the others are late.
    """
    size = (group or world_group()).size()
    # Include the device index, because each thread has its own current device.
    total = torch.ones(1, device=current_platform().device())

    def connect() -> None:
        dist.all_reduce(total, group=group)
        # Reading the value waits for the device.
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
