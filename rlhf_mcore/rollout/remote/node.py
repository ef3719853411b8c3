"""Ray on one node of a job: ``python -m rlhf_mcore.rollout.remote.node --address A {--head | --port P} [--cpus N]``.

``launch/slurm/train.sbatch`` starts it on every node. It ends with its step, and nothing of Ray is left then. The
head prints ``ray ADDRESS:PORT`` when it listens, at a port that it was given when it asked for one. It has no room for engines: it is
on a node of the trainer's. Whoever joins needs the token in RAY_AUTH_TOKEN.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlhf_mcore.own_processes import adopt_orphans, children, end_all, has_ended
from rlhf_mcore.parallel.addresses import shared_port, source_address
from rlhf_mcore.rollout.remote.head import LOOPBACK_ONLY, OBJECT_STORE_BYTES, SETTINGS, make_folder, remove_folder

_LOOK_S = 0.5
_JOIN_S = 120.0  # for the head to be there


def main() -> int:
    """Run Ray until it or this process is told to end. Returns the exit code."""
    parser = argparse.ArgumentParser("python -m rlhf_mcore.rollout.remote.node")
    parser.add_argument("--address", required=True, help="of the head, on the network between the nodes")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--port", type=int, help="of the head")
    which.add_argument("--head", action="store_true")
    parser.add_argument("--cpus", type=int, default=1, help="cores for engines; not of the head")
    args = parser.parse_args()
    if not os.environ.get("RAY_AUTH_TOKEN"):
        print(  # noqa: T201
            "error: RAY_AUTH_TOKEN is not set, and Ray would take orders from anybody; set a secret of 32 bytes or more"
        )
        return 2
    adopt_orphans()
    ending: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # the last through srun
        signal.signal(number, lambda received, _: ending.append(received))
    folder = str(make_folder(Path("/tmp")))  # paths of sockets are short
    environment = {**os.environ, **SETTINGS, "RAY_TMPDIR": folder}
    del environment[LOOPBACK_ONLY]
    end = time.monotonic() + _JOIN_S
    own = source_address(args.address)
    # For a service of the head that nobody uses, takes no port 0 and cannot be switched off
    reserved = shared_port(own)
    try:
        while True:
            command = _command(args, own, reserved.getsockname()[1], folder)
            ray = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            port = ""
            while not ending and not has_ended(ray.pid):
                if args.head and not port and (port := _port_of_head(folder)):
                    print(f"ray {args.address}:{port}", flush=True)  # noqa: T201 (the job's script reads it)
                time.sleep(_LOOK_S)
            if ending or port or time.monotonic() > end:
                return 0 if ending else 1
            _end_children()
    finally:
        _end_children()
        remove_folder(Path(folder))


def _command(args: argparse.Namespace, own: str, client_port: int, folder: str) -> list[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={own}", "--dashboard-agent-listen-port=0"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]  # any: jobs share nodes
    # Of every node its own: else an engine's node would make one of the head's name, and nobody would remove it there.
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder}"]
    if args.head:
        return [
            *command,
            *("--head", "--port=0", "--include-dashboard=false"),
            *(f"--ray-client-server-port={client_port}", "--num-cpus=0", "--num-gpus=0"),
        ]
    return [*command, f"--address={args.address}:{args.port}", f"--num-cpus={args.cpus}"]


def _port_of_head(folder: str) -> str:
    """Return the port of a head that has started, as Ray leaves it in its folder; "" before that."""
    with contextlib.suppress(OSError):
        return Path(folder, "ray_current_cluster").read_text(encoding="utf-8").strip().rpartition(":")[2]
    return ""


def _end_children() -> None:
    while running := [pid for pid in children() if not has_ended(pid)]:
        end_all(running)


if __name__ == "__main__":
    sys.exit(main())
