"""Ray on this machine for one run: a process between the trainer and Ray, so that nothing of Ray outlives the trainer.

Run as a module, with a socket as standard input. It reads an order, a line of JSON; starts Ray; answers with a line of JSON; and ends
everything when the other end of the socket is closed, which the kernel does when the trainer is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import tempfile
from pathlib import Path

from rlhf_mcore.own_processes import adopt_orphans, children, end_all, has_ended
from rlhf_mcore.parallel.addresses import LOOPBACK

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: no cluster, so nothing listens elsewhere
# Read by Ray when it is imported: it listens on the loopback only, sends nothing home, and starts no worker before it is asked to.
SETTINGS = {
    LOOPBACK_ONLY: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # Ray's 15 would let any other work on the machine go before generation
}
_NEEDED = ("gcs_server", "raylet")  # Ray's processes without which there is no Ray
OBJECT_STORE_BYTES = 80 * 2**20  # tokens and their logprobs are all that travels through it
_MANY = 65536  # cores that engines may ask for: here the user counts them, not Ray
_LONGEST_FOLDER = 30  # of its path: sockets below it have names of 70 characters, and a socket's may have 107
_LOOK_S = 0.5
_PREFIX, _LOCK = "rlhf-ray-", "lock"


def main() -> None:
    """Start Ray, tell its address, and end it with the trainer."""
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides, and saves first
    trainer = socket.socket(fileno=0)
    order = json.loads(trainer.makefile().readline())
    parent = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < _LONGEST_FOLDER else "/tmp")
    folder = make_folder(parent)
    try:
        answer = {"address": _start(folder, order["gpus"]), "folder": str(folder)}
        needed = [pid for pid in children() if Path(f"/proc/{pid}/comm").read_text().strip() in _NEEDED]
        trainer.sendall(json.dumps(answer).encode() + b"\n")
        parent_id, closed = os.getppid(), select.poll()
        closed.register(trainer, select.POLLRDHUP)
        while not closed.poll(_LOOK_S * 1000) and os.getppid() == parent_id:
            if any(has_ended(pid) for pid in needed):
                break
    finally:
        while left := [pid for pid in children() if not has_ended(pid)]:
            end_all(left)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # Ray's own exit handlers would talk to what has ended


def make_folder(parent: Path) -> Path:
    """A folder of Ray's below ``parent``, locked until this process ends, however it does. Others that nobody holds are removed."""
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    fcntl.flock(os.open(folder / _LOCK, os.O_CREAT | os.O_WRONLY, 0o600), fcntl.LOCK_EX)
    return folder


def remove_abandoned(parent: Path) -> None:
    """Remove folders of Ray below ``parent`` whose process was killed together with everything that would have removed them."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, without a lock yet, or held
            lock = os.open(folder / _LOCK, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _start(folder: Path, gpus: int) -> str:
    import ray

    ray.init(
        num_cpus=_MANY,
        num_gpus=gpus,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=LOOPBACK,
        _temp_dir=str(folder),
    )
    return str(ray.get_runtime_context().gcs_address)


if __name__ == "__main__":
    main()
