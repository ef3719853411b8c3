"""Run Ray on this machine for one run, in a process between the trainer and Ray. No process of Ray outlives the trainer.

Run this module with a socket as standard input. It reads a request (a line of JSON), starts Ray, and answers with a line of JSON.
It ends all processes when the other end of the socket is closed. The kernel closes that end if the trainer is killed.
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
from rlhf_mcore.own_processes import adopt_orphans, children, end_children, has_ended
from rlhf_mcore.parallel.addresses import LOOPBACK

LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: no cluster, so Ray listens on the loopback only
# Ray reads these at import. It listens on the loopback only, sends no usage statistics, and starts workers only on request.
SETTINGS = {
    LOOPBACK_ONLY: "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # with Ray's default of 15, any other work on the machine would slow down generation
}
_NEEDED = ("gcs_server", "raylet")  # processes that Ray cannot run without
OBJECT_STORE_BYTES = 80 * 2**20  # it transfers only tokens and their logprobs
_MANY = 65536  # cores that engines may request; the user counts the cores here, not Ray
_LONGEST_FOLDER = (
    20  # characters of the parent's path; a socket's path is limited to 107, and Ray and the names below use 87
)
_LOOK_S = 0.5
_PREFIX, _LOCK, _OF_RAY = "rlhf-ray-", "lock", "r"


def main() -> None:
    """Start Ray, send its address to the trainer, and end Ray when the trainer ends."""
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when Ray ends, and saves first
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
        end_children()
        remove_folder(folder)
        os._exit(0)  # Ray's exit handlers would call processes that have ended


def make_folder(parent: Path) -> Path:
    """Create a folder for Ray below ``parent``, inside a folder that only this user may enter.

    This process locks the outer folder until it ends, even if it is killed. Unlocked folders of this user are removed.

    Ray opens its folder with sockets and logs to all users (mode 0777). The outer folder protects it.
    """
    remove_abandoned(parent)
    while True:
        private = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = open_own(private / _LOCK, os.O_CREAT | os.O_WRONLY, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):  # another process removed it as abandoned before it was locked
            (folder := private / _OF_RAY).mkdir()
            return folder
        os.close(lock)


def remove_folder(folder: Path) -> None:
    """Remove the folders that ``make_folder`` has created."""
    shutil.rmtree(folder.parent, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove Ray's folders below ``parent`` if their process was killed before it could remove them.

    Other users may create files with such a name. A folder must be a directory of this user with a regular file as its lock.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(
            OSError, ConfigError
        ):  # it belongs to another user, has no lock file yet, or is locked
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
