"""Connects the devices of a group before anything else uses them."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch
import torch.distributed as dist

from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.platform import current_platform
from rlhf_mcore.protocols import PeersLost


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
