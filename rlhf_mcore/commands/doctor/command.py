"""``rlhf-mcore doctor``: check packages, machine and network, and print likely failures and bottlenecks with remedies."""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf_mcore import machine
from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.agent import launch
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.preflight import check_world
from rlhf_mcore.cli.rank import torchrun_world_size
from rlhf_mcore.cli.terminal import say, working
from rlhf_mcore.commands.doctor import hardware, software
from rlhf_mcore.commands.doctor.findings import Finding, as_json, as_text, worst
from rlhf_mcore.config.engine_kinds import engine_packages
from rlhf_mcore.sandbox.run import machine_level

QUICK_BYTES, FULL_BYTES = 4 << 20, 256 << 20  # written to the run directory
MESSAGE_BYTES = {"gloo": 16 << 20, "nccl": 256 << 20}
TIMEOUT = timedelta(minutes=2)
MODULES = ("torch", "megatron.core", *engine_packages(), "transformer_engine.pytorch", "amp_C", "flash_attn")

EPILOG = """\
exit codes:
  0          nothing found that stops a run (warnings are printed)
  1          at least one error
  2          an error in the command line"""


def local_findings(args: argparse.Namespace, num_ranks: int) -> Iterator[Finding]:
    """Run the checks of one node, which need no other rank."""
    wanted, megatron = software.requirements("rlhf_mcore"), software.requirements("megatron-core")
    names = [requirement.name for requirement in (*wanted, *megatron)]
    installed = machine.installed_versions([*names, *chain(*engine_packages().values())])
    yield from software.check_versions(wanted, installed)
    yield from software.check_transformer_engine(megatron, installed)
    gpus = machine.query_gpus()
    yield from hardware.check_gpus(gpus)
    yield from software.check_kernels(bool(gpus))
    if gpus:
        yield from software.check_cudnn(software.cudnn_version())
        yield software.check_fp8(software.compute_capability(), installed)
    yield software.check_expected(bool(gpus))
    if not args.quick:
        yield from software.check_imports(MODULES)
    if isinstance(gpus, list) and gpus:
        yield hardware.check_numa(gpus, os.sched_getaffinity(0))
    yield hardware.check_cores(os.environ, len(os.sched_getaffinity(0)), num_ranks)
    if not gpus:
        yield hardware.check_products(os.environ, machine.processor())
    yield hardware.check_memory()
    yield hardware.check_shared_memory(bool(gpus))
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # ranks raise their limit to the hard limit
    yield hardware.open_files(most_files, torchrun_world_size() or num_ranks)
    yield hardware.locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], machine.has_infiniband())
    yield hardware.check_isolation(machine_level())
    yield from hardware.check_storage(Path(args.run_dir), QUICK_BYTES if args.quick else FULL_BYTES)


Check = Callable[[argparse.Namespace, int], Iterable[Finding]]


@terminal.report_errors
def main(argv: Sequence[str] | None = None, local: Check = local_findings) -> int:
    """Run the checks and print the findings. Under torchrun every node checks itself, and rank 0 prints. Returns the exit code."""
    args = _parser().parse_args(argv)
    if args.ranks is not None and args.ranks < 2:
        _parser().error(f"--ranks {args.ranks}: measuring traffic needs at least 2 ranks")

    if torchrun_world_size() is not None:
        findings = _as_rank(args)
    else:
        with working("measuring between ranks") if args.ranks else nullcontext():
            traffic = _start_ranks(args) if args.ranks else []
        with working("checking versions, imports, devices, disk"):
            findings = [*local(args, args.ranks or 1), *traffic]
    if findings is None:
        return terminal.DONE
    if args.traffic_file:
        Path(args.traffic_file).write_text(json.dumps(as_json(findings)), encoding="utf-8")
        return terminal.DONE
    say(json.dumps(as_json(findings), indent=1) if args.json else as_text(findings))
    return terminal.FAILED if worst(findings) == "error" else terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore doctor",
        "Check versions, fused kernels, GPUs, limits and the disk of the run directory. With --ranks, or under torchrun, "
        "also measure latency and bandwidth between ranks.",
        examples=["rlhf-mcore doctor", "rlhf-mcore doctor --ranks 8 --run-dir outputs"],
        exits=EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="skip imports and long writes; takes less than two seconds"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="start N ranks on this machine and measure the traffic")
    parser.add_argument(
        "--run-dir", default="outputs", metavar="DIR", help="output directory of runs (default: outputs)"
    )
    parser.add_argument(
        "--traffic-file", help=argparse.SUPPRESS
    )  # for child processes: only measure traffic, and write the findings to this file
    return parser


def _start_ranks(args: argparse.Namespace) -> list[Finding]:
    """Measure the traffic between ranks of this machine, in child processes under torchrun."""
    check_world(args.ranks, "--ranks")
    with TemporaryDirectory(prefix="rlhf_mcore-") as folder:
        out = Path(folder) / "findings.json"
        code = launch(["--traffic-file", str(out)], args.ranks, 1, module="rlhf_mcore.commands.doctor.command")
        if code == terminal.DONE and out.is_file():
            return [Finding(**entry) for entry in json.loads(out.read_text(encoding="utf-8"))["findings"]]
    remedy = "read the message above; check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and that ports are free"
    ended = f"{args.ranks} ranks ended with code {code}"
    return [Finding("network", "error", ended, "runs with several processes do not start", remedy)]


def _as_rank(args: argparse.Namespace) -> list[Finding] | None:
    """Return the findings of all nodes and the traffic between ranks on rank 0, and None on the other ranks."""
    import torch.distributed as dist

    from rlhf_mcore.cli.rank import connect
    from rlhf_mcore.commands.doctor import network
    from rlhf_mcore.parallel.collectives import all_gather_json
    from rlhf_mcore.platform import current_platform

    platform = current_platform()
    platform.setup_process(int(os.environ["LOCAL_RANK"]), 1)
    connect(platform.collective_backend, TIMEOUT)
    try:
        node, own = socket.gethostname(), list[Finding]()
        if not args.traffic_file and os.environ["LOCAL_RANK"] == "0":  # the first rank of a node checks it
            local = local_findings(args, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            own = [replace(finding, node=node) for finding in local]
        gathered = all_gather_json(as_json(own)["findings"])
        findings = [Finding(**entry) for entries in gathered for entry in entries]
        nodes = [str(name) for name in all_gather_json(node)]
        if len(nodes) > 1:
            backend = "nccl" if platform.name == "cuda" else "gloo"
            findings += network.judge_traffic(network.measure(platform, MESSAGE_BYTES[backend]), backend, nodes)
        return findings if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
