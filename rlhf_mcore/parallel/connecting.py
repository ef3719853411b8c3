"""The connections of a group's devices, made before anything else asks for them."""

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

    NCCL connects a group in its first operation, for which it waits for every rank. Messages between some of the ranks would wait
    forever for the others. The memory of the connections is taken here too, so who measures free memory afterwards sees it.

    Args:
        group: None: all ranks of the world.
        limit_s: seconds to wait for the others; None: as long as the group does. While NCCL connects, a timeout of the group does
            not count, and torch no longer chooses NCCL's non-blocking mode, which hangs in some versions (pytorch issue 153960).
            So a thread connects. Where it is late, nobody waits for it any more.

    Raises:
        PeersLost: the others have not come in time.
    """
    size = (group or world_group()).size()
    total = torch.ones(1, device=current_platform().device())  # with an index: the device of a thread is its own

    def connect() -> None:
        dist.all_reduce(total, group=group)
        assert int(total) == size, f"{int(total)} of {size} ranks"  # reading it waits for the device

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
