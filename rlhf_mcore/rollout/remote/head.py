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
import stat
import tempfile
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_files import open_own
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
_LONGEST_FOLDER = (
    20  # of its parent's path: a socket's may have 107 characters, of which Ray and the names below take 87
)
_LOOK_S = 0.5
_PREFIX, _LOCK, _OF_RAY = "rlhf-ray-", "lock", "r"


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
        while running := [pid for pid in children() if not has_ended(pid)]:
            end_all(running)
        remove_folder(folder)
        os._exit(0)  # Ray's own exit handlers would talk to what has ended


def make_folder(parent: Path) -> Path:
    """Make a folder for Ray's own below ``parent``, inside one that this user alone may enter.

    This process holds the outer folder until it ends, however it does. Others of this user that nobody holds are removed.

    Ray opens the folder that it is given to everybody (mode 0777), with its sockets and logs.
    """
    remove_abandoned(parent)
    while True:
        private = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = open_own(private / _LOCK, os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # another process took it for an abandoned one before it was held
            (folder := private / _OF_RAY).mkdir()
            return folder
        os.close(lock)


def remove_folder(folder: Path) -> None:
    """Remove what ``make_folder`` has made."""
    shutil.rmtree(folder.parent, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove folders of Ray below ``parent`` whose process was killed before it could remove them.

    Anybody may have put anything at such a name: only a directory of this user with a regular file for its lock is one.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ConfigError):  # of another user, without a lock yet, or held
            if (status := folder.lstat()).st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
                continue
            lock = open_own(folder / _LOCK, os.O_WRONLY)
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
