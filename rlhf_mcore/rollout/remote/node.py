"""Run Ray on one node of a job: ``python -m rlhf_mcore.rollout.remote.node --address A {--head | --port P} [--cpus N]``.

``launch/slurm/train.sbatch`` starts this module on every node. It ends with its job step and leaves no process of Ray running. The
head listens on a free port and prints ``ray ADDRESS:PORT``. It offers no cores or GPUs to engines, because it is on a node of the
trainer. To join the cluster, a process needs the token in RAY_AUTH_TOKEN.
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

from rlhf_mcore.own_processes import adopt_orphans, end_children, has_ended, start
from rlhf_mcore.parallel.addresses import shared_port, source_address
from rlhf_mcore.rollout.remote.head import LOOPBACK_ONLY, OBJECT_STORE_BYTES, SETTINGS, make_folder, remove_folder

_LOOK_S = 0.5
_JOIN_S = 120.0  # timeout until Ray has started and the head answers


def main() -> int:
    """Run Ray until it ends or this process receives a signal. Return the exit code."""
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
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # srun sends the last one
        signal.signal(number, lambda received, _: ending.append(received))
    folder = str(make_folder(Path("/tmp")))  # socket paths must be short
    environment = {**os.environ, **SETTINGS, "RAY_TMPDIR": folder}
    del environment[LOOPBACK_ONLY]
    end = time.monotonic() + _JOIN_S
    own = source_address(args.address)
    # The head starts a client server that this project does not use. It rejects port 0 and cannot be disabled.
    reserved = shared_port(own)
    try:
        while True:
            command = _command(args, own, reserved.getsockname()[1], folder)
            ray = start(command, env=environment, stdout=subprocess.DEVNULL)
            port = ""
            while not ending and not has_ended(ray.pid):
                if args.head and not port and (port := _port_of_head(folder)):
                    print(f"ray {args.address}:{port}", flush=True)  # noqa: T201 (the job's script reads it)
                time.sleep(_LOOK_S)
            if ending or port or time.monotonic() > end:
                return 0 if ending else 1
            end_children()
    finally:
        end_children()
        remove_folder(Path(folder))


def _command(args: argparse.Namespace, own: str, client_port: int, folder: str) -> list[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={own}", "--dashboard-agent-listen-port=0"]
    command += ["--min-worker-port=0", "--max-worker-port=0"]  # 0: any free port, because jobs share nodes
    # Each node names its own folder. Otherwise a node would create a folder with the head's path and leave it behind.
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={folder}"]
    if args.head:
        return [
            *command,
            *("--head", "--port=0", "--include-dashboard=false"),
            *(f"--ray-client-server-port={client_port}", "--num-cpus=0", "--num-gpus=0"),
        ]
    return [*command, f"--address={args.address}:{args.port}", f"--num-cpus={args.cpus}"]


def _port_of_head(folder: str) -> str:
    """Return the head's port, which Ray writes into its folder, or "" if the head has not started yet."""
    with contextlib.suppress(OSError):
        return Path(folder, "ray_current_cluster").read_text(encoding="utf-8").strip().rpartition(":")[2]
    return ""


if __name__ == "__main__":
    sys.exit(main())
