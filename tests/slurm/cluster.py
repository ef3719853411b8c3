"""A SLURM cluster of three nodes on this machine, with its own ports, state and authentication. It ends with the tests."""

from __future__ import annotations

import getpass
import math
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.commands import wait_for
from tests.machine_speed import scale_seconds

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2", "n3")
MINUTES = str(math.ceil(scale_seconds(10)))  # ``--time`` of a job that should end by itself
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")  # final states of a job
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
GresTypes=gpu
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=300
InactiveLimit=0
KillWait=10
OverTimeLimit=5
MinJobAge=3600
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1024 Gres=gpu:2 State=UNKNOWN"
)


def missing_programs() -> list[str]:
    """Return the missing programs of SLURM and munge."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


@dataclass(slots=True)
class Cluster:
    """Three nodes with two cores and two GPUs each. SLURM counts the GPUs, but they do not exist."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a SLURM command, or a command that calls SLURM."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=scale_seconds(120),
            check=False,
        )

    def job(self, job_id: str) -> dict[str, str]:
        """Return scontrol's description of a job, by key."""
        text = self.run("scontrol", "show", "job", job_id, "--oneliner").stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job_id: str, seconds: float = 400, state: tuple[str, ...] = ()) -> dict[str, str]:
        """Wait until a job is in one of the states or in a final state."""
        wait_for(lambda: self.job(job_id).get("JobState") in (state or OVER), seconds, self.log)
        return self.job(job_id)

    def wait_for(self, condition: Callable[[], object], job_id: str, explain: Callable[[], str]) -> None:
        """Wait until a condition holds, at most until the job ends."""
        wait_for(condition, 400, explain, lambda: self.job(job_id).get("JobState") in OVER)

    def log(self) -> str:
        """Return the end of the daemons' logs, for messages of failed tests."""
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.log"))


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the daemons and wait until all nodes are idle."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    environment |= {"PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    cluster = Cluster(folder, environment)
    daemons: list[subprocess.Popen[bytes]] = []
    _write_files(folder)
    try:
        for command in _daemons(folder):
            with (folder / f"{command[0]}.out").open("ab") as out:
                daemons.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
                )
            if command[0] == "munged":
                wait_for((folder / "munge.socket").exists)
        wait_for(lambda: _idle(cluster), explain=cluster.log)
        yield cluster
    finally:
        cluster.run("scancel", "--full", "--signal=KILL", f"--user={getpass.getuser()}")
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(timeout=scale_seconds(30))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _idle(cluster: Cluster) -> bool:
    return cluster.run("sinfo", "--noheader", "--format=%T %D").stdout.split() == ["idle", str(len(NODES))]


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _daemons(folder: Path) -> list[list[str]]:
    munge = [f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"]
    munge += [f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log"]
    conf = str(folder / "slurm.conf")
    return [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c", "-f", conf],
        *(["slurmd", "-D", "-c", "-N", name, "-f", conf] for name in NODES),
    ]


def _write_files(folder: Path) -> None:
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    ports = _free_ports(1 + len(NODES))
    nodes = [NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports[1:], strict=True)]
    text = CONF.format(
        host=host,
        ports=ports,
        user=getpass.getuser(),
        folder=folder,
        nodes="\n".join(nodes),
        names=",".join(NODES),
    )
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    for number in range(2):
        (folder / f"gpu{number}").touch()  # SLURM counts device files
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n", encoding="utf-8")


def _free_ports(count: int) -> list[int]:
    """Return free ports below the range from which connections of other tests get theirs."""
    ports: list[int] = []
    for port in random.sample(range(15000, 30000), 200):
        with socket.socket() as each, suppress(OSError):
            each.bind(("127.0.0.1", port))
            ports.append(port)
    return ports[:count]
