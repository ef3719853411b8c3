"""Two ranks save together, successfully and with faults on one rank. The observations of each rank go to findings.json."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.numpy import load_file, save_file

from rlhf_mcore.checkpoint.collective import CheckpointWriter, decide_together
from rlhf_mcore.checkpoint.delta import readable, verify_chain
from rlhf_mcore.checkpoint.layout import linked_step, scan, scan_transitional
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, read_manifest, verify
from rlhf_mcore.checkpoint.triggers import SignalRequests, Triggers
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore.parallel.collectives import all_gather_json, on_every_rank
from rlhf_mcore_contrib.deltas import write as write_deltas
from tests.unit.checkpoint.saving import FailingDisk, complete


class Ranks:
    """The checks. Each returns the observations of this rank and uses a separate run directory."""

    def __init__(self, directory: Path, small: Path) -> None:
        self.directory, self.small = directory, small
        self.rank = dist.get_rank()

    def write(self, partial: Path, size: int = 100) -> list[Path]:
        """Write a file of this rank, and a further file on the first rank."""
        mine = partial / "actor" / f"part-{self.rank}"
        mine.parent.mkdir(exist_ok=True)
        mine.write_bytes(bytes([self.rank]) * size)
        if self.rank == 0:
            (partial / "state.json").write_text("{}")
            return [mine, partial / "state.json"]
        return [mine]

    def run(self, name: str) -> Path:
        return self.directory / name

    def together(self) -> Any:
        path = CheckpointWriter(self.run("together")).save(CheckpointInfo(10), self.write)
        return [sorted(read_manifest(path).files), verify(path), linked_step(path.parent, "latest")]

    def full_disk(self) -> Any:
        """Only the file of rank 1 does not fit."""
        writer = CheckpointWriter(self.small)
        writer.save(CheckpointInfo(10), self.write)

        def write(partial: Path) -> list[Path]:
            """Write on the first rank before the other rank has filled the disk."""
            if self.rank == 0:
                paths = self.write(partial, 1)
                dist.barrier()
                return paths
            dist.barrier()
            return self.write(partial, 4 * 2**20)

        with _file_size_limited(self.rank == 1 and not os.path.ismount(self.small)):
            seen = message(lambda: writer.save(CheckpointInfo(20), write))
        return [seen, state(self.small)]

    def full_disk_at_the_manifest(self) -> Any:
        run = self.run("manifest")
        CheckpointWriter(run).save(CheckpointInfo(10), self.write)
        disk = FailingDisk(errno.ENOSPC, lambda name, path: path.name == "manifest.json")
        return [message(lambda: CheckpointWriter(run, disk).save(CheckpointInfo(20), self.write)), state(run)]

    def moment(self) -> Any:
        """Storage fails once for one rank, at a point at which only a complete new attempt is safe."""
        run = self.run("moment")
        failed: list[Path] = []

        def once(name: str, path: Path) -> bool:
            fails = self.rank == 1 and name == "fsync" and path.name == "part-1" and not failed
            failed.extend([path] if fails else [])
            return fails

        CheckpointWriter(run, FailingDisk(errno.EIO, once)).save(CheckpointInfo(10), self.write)
        return [len(failed), state(run)]

    def broken_for_good(self) -> Any:
        run = self.run("broken")
        attempts: list[Path] = []
        disk = FailingDisk(errno.EIO, lambda name, path: self.rank == 1 and name == "fsync" and path.name == "part-1")
        seen = message(
            lambda: CheckpointWriter(run, disk).save(CheckpointInfo(10), lambda p: attempts.append(p) or self.write(p))
        )
        return [seen, len(attempts), state(run)]

    def mistake_on_a_rank(self) -> Any:
        run = self.run("mistake")
        seen = message(
            lambda: CheckpointWriter(run).save(CheckpointInfo(10), lambda p: self.write(p) if self.rank else [][1])
        )
        return [seen, state(run)]

    def begun_and_never_finished(self) -> Any:
        """A step raises between the start and the end of a save, and is repeated in the same process."""
        run = self.run("stale")
        writer = CheckpointWriter(run)
        left = writer.begin(10)
        (left / f"stale-{self.rank}").write_text("stale")
        dist.barrier()
        path = writer.save(CheckpointInfo(10), self.write)
        return [sorted(read_manifest(path).files), verify(path), len(list((run / "quarantine").iterdir()))]

    def in_the_background(self) -> Any:
        """The local part runs without the other rank. Only start and end are collective."""
        run = self.run("background")
        writer = CheckpointWriter(run)
        partial = writer.begin(10)
        entries, error = writer.attempt(partial, self.write)
        before = linked_step(run, "latest")
        dist.barrier()
        writer.finish(CheckpointInfo(10), partial, entries, error)
        return [before, state(run)]

    def deltas(self) -> Any:
        """Each rank writes a weight file; every second save is a full one."""
        run = self.run("deltas")
        writer = CheckpointWriter(run, deltas=write_deltas, full_every=2)
        kinds = []
        for step in (1, 2, 3):
            info = writer.next_info(step, {})
            path = writer.save(info, lambda partial, step=step: self.write_weights(partial, step))
            kinds.append(info.base.name if info.base else info.kind)
            assert verify_chain(path) == []
        dist.barrier()
        whole = readable(run / "checkpoint-2", scratch=self.run(f"scratch-{self.rank}"))
        return [kinds, [load_file(whole / f"model-{rank}.safetensors")["w"].tolist() for rank in (0, 1)]]

    def write_weights(self, partial: Path, step: int) -> list[Path]:
        path = partial / "actor" / f"model-{self.rank}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file({"w": np.full(4, 10 * step + self.rank, np.float32)}, path)
        if self.rank == 1:
            return [path]
        index = path.with_name("model.safetensors.index.json")
        index.write_text(json.dumps({"weight_map": {f"w{rank}": f"model-{rank}.safetensors" for rank in (0, 1)}}))
        return [path, index, *complete(partial)]

    def decisions(self) -> Any:
        run = self.run("decisions")
        config = CheckpointConfig(save_steps=3, metric_for_best_model="evaluate/reward")
        triggers = Triggers(config, 10, run) if self.rank == 0 else None
        if triggers:
            triggers.begin()
        out = []
        with SignalRequests().listening() as requests:
            out.append(decide_together(triggers, requests, 1, {}).to_json())
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
            out.append(decide_together(triggers, requests, 2, {}).to_json())
            out.append(decide_together(triggers, requests, 3, {"evaluate/reward": 0.5}).to_json())
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            out.append(decide_together(triggers, requests, 4, {}).to_json())
            out.append(message(lambda: decide_together(triggers, requests, 5, {"evaluate/accuracy": 0.5})))
        return out

    def failures(self) -> Any:
        def fails(error: Exception) -> Callable[[], int]:
            def action() -> int:
                if self.rank == 1:
                    raise error
                return 7

            return action

        return [
            message(lambda: on_every_rank(fails(ConfigError("a.b=1 is wrong")))),
            message(lambda: on_every_rank(fails(KeyError("lost")))),
            on_every_rank(lambda: self.rank),
        ]


class _file_size_limited:
    """If no small disk can be mounted, a limit on the file size makes writes fail instead."""

    def __init__(self, limited: bool) -> None:
        self.limited = limited

    def __enter__(self) -> None:
        if self.limited:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))

    def __exit__(self, *_: object) -> None:
        if self.limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def message(action: Callable[[], object]) -> str:
    """Return class and text of the error that an action raises."""
    try:
        return f"no error, but {action()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def state(run: Path) -> Any:
    """Return the intact checkpoints, ``latest``, and incomplete files."""
    intact = [item.step for item in scan(run) if verify(item.path) == []]
    return [intact, linked_step(run, "latest"), [item.path.name for item in scan_transitional(run)]]


def main(directory: Path, small: Path) -> None:
    dist.init_process_group("gloo")
    ranks = Ranks(directory, small)
    names = [
        name
        for name in vars(Ranks)
        if name not in ("__init__", "write", "write_weights", "run") and not name.startswith("__")
    ]
    mine = {}
    for name in names:
        mine[name] = getattr(ranks, name)()
        dist.barrier()
    seen = all_gather_json(mine)
    if dist.get_rank() == 0:
        findings = {name: [part[name] for part in seen] for name in names}
        (directory / "findings.json").write_text(json.dumps(findings))
    dist.destroy_process_group()
