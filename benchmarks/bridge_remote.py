"""Compare the time of a sync to an engine in a separate process with a sync to an engine in the trainer's process.

One trainer rank (Megatron) and two vLLM engines run, one engine in the trainer's process and one in another process.
The kinds of sync run in turn:

- colocated: ``PlannedBridge.sync``, which copies in memory and lets vLLM repack.
- remote: ``RemoteBridge.sync`` over the joint group, through memory that both processes map, as on one machine.
- messages: the same through loopback sockets, as between machines without a faster network.

The result is the median of remote / colocated for the larger model. The separate engine repacks while the trainer packs the next
bucket, so on two cores the ratio can be below 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from benchmarks.bridge_sync import BUCKET_BYTES, SIZES, make_model
from benchmarks.common import report, time_call
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.run.remote import BridgeJob, EngineEnd, RemoteBridge, Side
from rlhf_mcore.bridge.run.sync import NoTarget
from rlhf_mcore.bridge.run.transports import GroupLinks
from rlhf_mcore.config.schema import RecomputeConfig, RolloutConfig
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.addresses import LOOPBACK
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from rlhf_mcore.protocols import EngineProcess, GroupSpec
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from tests.planned_bridge import planned_bridge

ROOT = Path(__file__).resolve().parents[1]
GOAL = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small model, fewer rounds")
    parser.add_argument("--process", nargs=3, metavar=("ROLE", "DIRECTORY", "ROUNDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        role, directory, rounds = args.process
        serve(Path(directory)) if role == "engine" else train(Path(directory), int(rounds))
        return
    rows = []
    for size in ("small",) if args.quick else tuple(SIZES):
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory, "model"), SIZES[size])
            subprocess.run(command("trainer", directory, 5 if args.quick else 15), cwd=ROOT, check=True)
            rows.append({"model": size, **json.loads(Path(directory, "row.json").read_text(encoding="utf-8"))})
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    ratio = rows[-1]["ratios"]["remote/colocated"]["median"]
    report("bridge_remote", {"bucket_bytes": BUCKET_BYTES, "rows": rows}, ratio=ratio, goal=GOAL, quick=args.quick)


def command(role: str, directory: Path | str, rounds: int = 0) -> list[str]:
    return [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.bridge_remote",
        "--process",
        role,
        str(directory),
        str(rounds),
    ]


def start_engine(directory: Path, world: str) -> Any:
    """Start a vLLM engine in this process, which is a world of one."""
    platform, path = current_platform(), str(directory / "model")
    platform.setup_process(0, 1)
    store = dist.FileStore(str(directory / world), 1)
    dist.init_process_group(platform.collective_backend, store=store, rank=0, world_size=1)
    cfg = RolloutConfig(kv_cache_gib=0.02, gpu_memory_utilization=0.2)
    shapes = hf_shapes(load_spec(path).geometry)
    return build_engine(cfg, EngineModel(path, path, platform.default_dtype, max_model_len=64, seed=0, shapes=shapes))


def no_sharing() -> Any:
    """Disable shared memory between processes."""
    return mock.patch.object(GroupLinks, "share", lambda *_: None)


def serve(directory: Path) -> None:
    """Run the separate engine. It executes the commands on stdin, one line of JSON each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    end = EngineEnd(start_engine(directory, "engine"))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "spec" in asked:
            if asked["messages"]:
                no_sharing().start()
            end.join(GroupSpec(**asked["spec"]), asked["bridge"])
        else:
            end.sync(asked["version"])
        print("done", file=out, flush=True)


class OneEngine:
    """The control of the separate engine: a :class:`RemoteEngines` with one engine that never fails."""

    def __init__(self, directory: Path) -> None:
        self.messages = False
        self._process = subprocess.Popen(
            command("engine", directory), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.finish(0)

    def pause(self) -> list[EngineProcess]:
        return [EngineProcess("engine", str(self._process.pid))]

    def join(self, specs: Sequence[GroupSpec], bridge: str) -> None:
        self._ask({"spec": asdict(specs[0]), "bridge": bridge, "messages": self.messages})

    def begin_sync(self, version: int) -> None:
        self._ask({"version": version})

    def finish(self, timeout_s: float) -> list[str]:
        assert self._process.stdout is not None
        return [] if self._process.stdout.readline() else ["the engine is gone"]

    def resume(self, version: int) -> None: ...

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


def train(directory: Path, rounds: int) -> None:
    """Run the trainer's process. It measures and writes a row."""
    control = OneEngine(directory)
    engine = start_engine(directory, "trainer")
    model = make_trainer(directory / "model")
    geometry, parameters = model.spec.geometry, model.local_parameters()
    colocated = planned_bridge(parameters, geometry, engine, world_group(), bucket_bytes=BUCKET_BYTES)

    def remote(verify: bool) -> RemoteBridge:
        job, side = BridgeJob(geometry, BUCKET_BYTES, verify, weights="loaders"), Side(parameters, NoTarget())
        return RemoteBridge(side, job, world_group(), control, address=LOOPBACK, timeout_s=120)

    row: dict[str, Any] = {"parameters": sum(p.tensor.numel() for p in parameters), "seconds": {}, "ratios": {}}
    for name in ("remote", "messages"):
        control.messages = name == "messages"
        if control.messages:
            no_sharing().start()
        (checked := remote(True)).sync(0)
        checked.leave()
        bridge = remote(False)
        bridge.sync(1)
        colocated.sync(1)
        times = [[time_call(lambda: b.sync(2))[1].wall_s for b in (bridge, colocated)] for _ in range(rounds)]  # noqa: B023
        row["seconds"] |= {
            name: round(statistics.median(t[0] for t in times), 5),
            f"colocated beside {name}": round(statistics.median(t[1] for t in times), 5),
        }
        pairs = [one / other for one, other in times]
        row["ratios"][f"{name}/colocated"] = {
            "median": round(statistics.median(pairs), 3),
            "min": round(min(pairs), 3),
            "max": round(max(pairs), 3),
        }
        bridge.leave()
    (directory / "row.json").write_text(json.dumps(row), encoding="utf-8")
    control.close()
    engine.close()
    dist.destroy_process_group()


def make_trainer(path: Path) -> MegatronModel:
    platform = current_platform()
    options = BuildOptions(platform.default_dtype, "auto", RecomputeConfig(), True, False, 0)
    groups = build_groups(ParallelLayout(1))
    assert groups is not None
    spec = load_spec(path)
    model = build_model(spec, groups, platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    return model


if __name__ == "__main__":
    main()
