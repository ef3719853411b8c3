"""Findings of checks: severity, consequence and remedy of each problem, and their output as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SEVERITIES = ("ok", "note", "warning", "error")  # in increasing order; a note needs no action


_REINSTALL = "run ./launch/setup.sh, or install the versions of requirements/"
_CONTAINER = "use the image that the Dockerfile builds; NVIDIA's PyTorch container includes it"
_SHM = "start the container with --ipc=host or --shm-size=16g"
_CLOCKS = "synchronise the clocks (chrony or ntpd)"

# Consequence and remedy of each problem that a finding may name.
TROUBLES = {
    # versions and kernels
    "missing package": ("code that needs the package fails on import", _REINSTALL),
    "other version": (
        "this combination is not tested: runs may fail, or give other results without an error",
        _REINSTALL,
    ),
    "no engine": ("rollout.engine=vllm cannot start; only the slow engine hf can", _REINSTALL),
    "untested transformer-engine": (
        "megatron-core is not tested with this version",
        "compare the first losses with model.layer_spec=local, or use a container with a supported version",
    ),
    "cudnn": (
        "Transformer Engine has no attention for packed sequences of gpt-oss",
        f"{_CONTAINER}; or set trainer.packing=false for gpt-oss",
    ),
    "transformer-engine": (
        "layers use Megatron's local spec without fused norms and linear layers; except on Hopper, experts run one by one",
        _CONTAINER,
    ),
    "apex (NVIDIA)": (
        "the optimizer and gradient clipping use torch's kernels, a few ms slower per update",
        _CONTAINER,
    ),
    "flash-attn": (
        "Transformer Engine uses cuDNN's attention for packed sequences; some shapes are slower",
        "pip install flash-attn --no-build-isolation",
    ),
    "import": ("a run stops at this import", _REINSTALL),
    # the machine
    "broken driver": ("runs cannot use the GPUs", "reinstall or reload the NVIDIA driver; reboot the node"),
    "different gpus": ("all GPUs wait for the slowest", "use one GPU model"),
    "gpu memory in use": (
        "a run may run out of memory, because the engine takes a share of the whole device",
        "end the processes that nvidia-smi lists, or lower rollout.gpu_memory_utilization",
    ),
    "gpu memory errors": (
        "results may be wrong and the process may be killed",
        "drain the node and reset or replace the GPU",
    ),
    "threads": (
        "threads wait for each other in busy loops; runs become several times slower",
        "set OMP_NUM_THREADS={fitting} (trainer.threads_per_rank)",
    ),
    "numa": (
        "copies between such a GPU and the host are slower",
        "allow cores of every node; check taskset, --cpu-bind of SLURM and --cpuset-cpus of Docker, which restrict them",
    ),
    "memory": (
        "a rank needs about 1 GiB in addition to its weights; the kernel kills processes when memory runs out",
        "end other programs, or use fewer ranks",
    ),
    "no shared memory": ("NCCL and vLLM fail at start", _SHM),
    "shared memory": ("ranks of a node die with a bus error when shared memory is full", _SHM),
    "open files": (
        "large worlds fail with 'too many open files', because every group opens sockets for every pair of its ranks",
        "ulimit -Hn {files}, LimitNOFILE of the service that starts jobs, or docker run --ulimit nofile={files}:{files}",
    ),
    "locked memory": (
        "InfiniBand cannot register buffers: NCCL fails or uses slow sockets",
        "ulimit -l unlimited; in a container --ulimit memlock=-1; for SLURM PropagateResourceLimitsExcept=MEMLOCK",
    ),
    "sandbox": (
        "a run with the reward rule code, or a tool that runs programs, is rejected (reward.sandbox.minimum=filters)",
        "{remedy}",
    ),
    # the run directory
    "run directory": ("nothing can be saved", "choose another output_dir"),
    "disk space": (
        "a full checkpoint takes 14 bytes per parameter: 98 GB for 7B",
        "choose an output_dir with more free space, or set checkpoint.save_total_limit",
    ),
    "disk speed": (
        "one process writes a checkpoint of a 7B model (98 GB) in {minutes:.0f} min",
        "use a parallel file system or a local disk as output_dir, and checkpoint.async_save",
    ),
    "clock": ("checkpoints and logs have wrong times", _CLOCKS),
    # between ranks
    "ranks do not start": (
        "runs with several processes do not start",
        "read the message above; check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and that ports are free",
    ),
    "network": (
        "syncs, pipeline exchanges and gradient reductions wait for this link",
        "look for 'via NET/Socket' in NCCL_DEBUG=INFO: InfiniBand or NVLink is not used; set NCCL_IB_HCA or NCCL_SOCKET_IFNAME",
    ),
    "clocks of the ranks": ("times in logs and traces of different nodes cannot be compared", _CLOCKS),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check on one node. ``consequence`` and ``remedy`` are empty if no action is needed."""

    check: str
    severity: str
    found: str
    consequence: str = ""
    remedy: str = ""
    node: str = ""

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity
        assert self.severity in ("ok", "note") or (self.consequence and self.remedy), self.check


def judge(check: str, severity: str, found: str, trouble: str = "", **values: object) -> Finding:
    """Return a finding. A warning or error includes consequence and remedy of ``trouble`` (default: ``check``).

    ``values`` fill the placeholders in these two texts.
    """
    if severity in ("ok", "note"):
        return Finding(check, severity, found)
    consequence, remedy = (text.format(**values) for text in TROUBLES[trouble or check])
    return Finding(check, severity, found, consequence, remedy)


def worst(findings: Iterable[Finding]) -> str:
    """Return the highest severity among findings; "ok" for none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the content of ``doctor --json``."""
    return {"worst": worst(findings), "findings": [asdict(finding) for finding in findings]}


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line per finding, followed by its consequence and remedy, if any."""
    name_nodes = len({finding.node for finding in findings}) > 1
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        node = f" [{finding.node}]" if name_nodes and finding.node else ""
        lines.append(f"{finding.severity:<8} {finding.check:<{width}}  {finding.found}{node}")
        indent = " " * (width + 11)
        if finding.consequence:
            lines.append(f"{indent}so: {finding.consequence}")
        if finding.remedy:
            lines.append(f"{indent}do: {finding.remedy}")
    counts = {name: sum(f.severity == name for f in findings) for name in SEVERITIES[::-1]}
    summary = ", ".join(
        f"{count} {name}" + ("s" if count != 1 and name != "ok" else "") for name, count in counts.items() if count
    )
    return "\n".join([*lines, "", f"{summary or 'nothing checked'}"])
