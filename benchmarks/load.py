"""Compare loading a model on four ranks with one process that reads all tensors in turn, both from slow storage.

The directory has 163 files, and its index names 92,000 tensors, as many as the index of a model with 671B parameters in fp8. The
model that is loaded is small. The ranks use TP2·PP2, on one node.

Slow storage is emulated around the calls that ``HFReader`` makes, in every process alike. A process waits 20 ms to open a file or
the index, 5 ms to look at a file's metadata, and 2 ms plus a second per 200 MB to read a rectangle. Threads and ranks wait
independently, like the streams of a parallel file system whose total bandwidth is not reached. The page cache does not help.

Each variant loads in turn. "apart": every rank reads the index, with one thread per rank. "one index": the first rank reads it for
all. "threads": a rank also has ``READERS`` threads, as in a run. Bytes are the bytes of rectangles by the bytes of the rank's
parameters. Memory is the growth of a process's own pages, which excludes mapped files. The ratio is the median time of the slowest
rank by the median time of the sequential reader.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common import report
from benchmarks.synthetic import parameters
from rlhf_mcore.bridge.files import hf_files
from rlhf_mcore.bridge.files.hf_files import INDEX, HFReader, load, locate_tensors
from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.geometry import GroupedSizes, LocalParameter, ModelGeometry
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.layout import ParallelLayout

GOAL = 0.4
RANKS, FILES, INDEXED = 4, 163, 92_000
OPEN_S, LOOK_S, REQUEST_S, BYTES_PER_S = 20e-3, 5e-3, 2e-3, 200e6
LAYOUT = ParallelLayout(RANKS, tp=2, pp=2)
SIZES = ModelGeometry("llama", 40, 512, GroupedSizes(8, 4, 64), 1408, 32000, False)  # 151M parameters
VARIANTS = ("apart", "one index", "threads")


def write_model(directory: Path, geometry: ModelGeometry) -> None:
    shapes, shard_of = hf_shapes(geometry), dict[str, str]()
    for k in range(FILES):
        file = f"model-{k + 1:05d}-of-{FILES:06d}.safetensors"
        names = list(shapes)[k * len(shapes) // FILES : (k + 1) * len(shapes) // FILES]
        save_file({name: torch.randn(shapes[name]).bfloat16() for name in names}, directory / file)
        shard_of |= dict.fromkeys(names, file)
    files = sorted(set(shard_of.values()))
    others = range(INDEXED - len(shard_of))
    shard_of |= {f"model.layers.{k // 1536}.mlp.experts.{k % 1536}.weight": files[k % FILES] for k in others}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    (directory / "config.json").write_text(json.dumps({"model_type": geometry.family}))


class SlowStorage:
    """Delays and counts this process's reads of model directories while it is active."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._inside, self._read_json = hf_files.inside, hf_files.read_json
        vars(hf_files).update(inside=self._look, read_json=self._read_index, safe_open=self._open)

    def close(self) -> None:
        vars(hf_files).update(inside=self._inside, read_json=self._read_json, safe_open=safe_open)

    def wait(self, kind: str, seconds: float, count: int = 1) -> None:
        self.counts[kind] += count
        time.sleep(seconds)

    def _look(self, *args: Any, **options: Any) -> Path:
        self.wait("looks", LOOK_S)
        return self._inside(*args, **options)

    def _read_index(self, path: Path, **options: Any) -> Any:
        self.wait("indexes", OPEN_S + path.stat().st_size / BYTES_PER_S)
        return self._read_json(path, **options)

    def _open(self, path: Path, framework: str) -> _SlowFile:
        self.wait("opens", OPEN_S)
        return _SlowFile(safe_open(path, framework=framework), self)


class _SlowFile:
    def __init__(self, file: Any, storage: SlowStorage) -> None:
        self.keys, self._file, self._storage = file.keys, file, storage

    def get_slice(self, name: str) -> _SlowSlice:
        return _SlowSlice(self._file.get_slice(name), self._storage)


class _SlowSlice:
    def __init__(self, part: Any, storage: SlowStorage) -> None:
        self.get_shape, self.get_dtype, self._part, self._storage = part.get_shape, part.get_dtype, part, storage

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        found: Tensor = self._part[where]
        self._storage.wait("bytes", REQUEST_S + found.nbytes / BYTES_PER_S, found.nbytes)
        return found


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measure(action: Callable[[], object]) -> dict[str, float]:
    """Return seconds, counts, and the growth of this process's own memory, of an action on slow storage."""
    storage, peak, done = SlowStorage(), own_bytes(), Event()
    before = peak

    def watch() -> None:
        nonlocal peak
        while not done.wait(2e-3):
            peak = max(peak, own_bytes())

    watcher = Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    action()
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    storage.close()
    return {"wall_s": seconds, "grown": peak - before, "indexes": 0, "looks": 0, **storage.counts}


def read_all(directory: Path) -> dict[str, float]:
    def action() -> None:
        for _, tensor in HFReader(directory).tensors(without=others):
            tensor.clone()

    others = [name for name in json.loads((directory / INDEX).read_text())["weight_map"] if ".experts." in name]
    return measure(action)


def load_rank(directory: Path, mine: list[LocalParameter], geometry: ModelGeometry, variant: str) -> dict[str, float]:
    """Load a rank's parameters. Collective over the world."""
    readers, hf_files.READERS = hf_files.READERS, hf_files.READERS if variant == "threads" else 1

    def action() -> None:
        shard_of = None if variant == "apart" else locate_tensors(directory)
        load(mine, geometry, HFReader(directory, shard_of=shard_of))

    dist.barrier()
    found = measure(action)
    hf_files.READERS = readers
    size = sum(parameter.tensor.nbytes for parameter in mine)
    return {**found, "bytes_ratio": found.pop("bytes") / size, "memory_mib": found.pop("grown") / 2**20}


def worker(directory: Path, rank: int, geometry: ModelGeometry, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=600))
    mine = [replace(p, tensor=torch.ones_like(p.tensor).bfloat16()) for p in parameters(geometry, LAYOUT, rank)]
    found = [
        {name: all_gather_json(load_rank(directory, mine, geometry, name)) for name in VARIANTS} for _ in range(rounds)
    ]
    reader = HFReader(directory)
    for parameter in mine:
        for piece in pieces(parameter.name, geometry, parameter.shard):
            assert torch.equal(view(parameter.tensor, piece), reader.read(piece.hf_name, piece.slices)), piece.hf_name
    if rank == 0:
        (directory / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller vocabulary and one round")
    args = parser.parse_args()
    geometry, rounds = (replace(SIZES, vocab_size=2000), 1) if args.quick else (SIZES, 3)
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(directory, geometry)
        alone = [read_all(directory) for _ in range(rounds)]
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=worker, args=(directory, rank, geometry, rounds)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert not any(process.exitcode for process in ranks)
        found = json.loads((directory / "found.json").read_text())
    sequential = statistics.median(row["wall_s"] for row in alone)
    variants = {}
    for name in VARIANTS:
        rows = [row[name] for row in found]
        variants[name] = {
            "wall_s": statistics.median(max(rank["wall_s"] for rank in row) for row in rows),
            "memory_mib": max(rank["memory_mib"] for row in rows for rank in row),
            "bytes_ratio": max(rank["bytes_ratio"] for row in rows for rank in row),
            "indexes_of_node": sum(rank["indexes"] for rank in rows[0]),
            "looks_of_node": sum(rank["looks"] for rank in rows[0]),
            "opens_of_rank": max(rank["opens"] for rank in rows[0]),
        }
        variants[name]["ratio"] = variants[name]["wall_s"] / sequential
        print(name, variants[name], flush=True)
    details = {
        "sequential_s": sequential,
        "sequential_opens": alone[0]["opens"],
        "rounds": rounds,
        "variants": variants,
    }
    report("load", details, ratio=variants["threads"]["ratio"], goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
