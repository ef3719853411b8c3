"""Measure the bytes that a rank reads from disk to check a checkpoint before a run resumes from it.

The checkpoint contains bf16 weights, fp32 master weights and both moments. Worlds of 1 to 8 processes check it. A rank reads its
files for their hashes and again for their values; the second read comes from the page cache. Read-ahead of the system counts
too. The ratio is the largest number of bytes per rank, divided by an equal share of all bytes plus the largest file. The result
also contains the bytes of a single process that drops its files from the page cache in between.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import report
from benchmarks.save_speed import forget
from benchmarks.synthetic import LARGE, shards
from rlhf_mcore.bridge.files.state_files import MASTER, STATE_INDEX, RankState, make_index, state_file
from rlhf_mcore.bridge.files.state_reader import StateReader
from rlhf_mcore.bridge.files.tensor_files import ShardFiles, cut_into_shards, write_index
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.checkpoint import rng
from rlhf_mcore.checkpoint.delta import verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import CONFIG, DATALOADER, RNG_FILE, TRAINER_STATE, TRAINING
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, files_below, hash_files, write_manifest
from rlhf_mcore.cli.saved_checkpoint import SharedChecker, check_saved, serve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.parallel.collectives import Ask, all_gather_json, lead
from rlhf_mcore.parallel.layout import ParallelLayout

GOAL = 1.0
SHARD_BYTES = 64 * 2**20


def write_checkpoint(checkpoint: Path, geometry: ModelGeometry, num_ranks: int) -> None:
    """Write a checkpoint as a run on ``num_ranks`` ranks would save it."""
    training, layout, described = checkpoint / "actor" / TRAINING, ParallelLayout(num_ranks), {}
    training.mkdir(parents=True)
    for rank in range(num_ranks):
        mine = shards(geometry, layout, rank)
        for shard in mine:
            shard.tensors[MASTER] = torch.randn(shard.stop - shard.start)  # type: ignore[index]
        state = RankState(mine, geometry)
        state.write(training / state_file(rank))
        described[rank] = state.described
    scalars = {"step": 1, "loss_scale": None, "num_updates": 1, "num_bad_updates": 0}
    (training / STATE_INDEX).write_text(json.dumps(make_index(described, geometry, scalars)))
    weights = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in hf_shapes(geometry).items()}
    state = StateReader(training, geometry)
    for file, kind, name, rectangle in state.regions():
        if kind == MASTER:
            values = state.read_region(file, kind, name, rectangle)
            weights[name][rectangle.slices()] = values.to(torch.bfloat16)
    files = cut_into_shards({name: 2 * tensor.numel() for name, tensor in weights.items()}, 1, SHARD_BYTES)
    types = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    writer = ShardFiles(checkpoint / "actor", files, types)
    for name, tensor in weights.items():
        writer.write(name, tensor)
    writer.close()
    write_index(checkpoint / "actor", files, types)
    (checkpoint / "actor" / "config.json").write_text(json.dumps(hf_config(geometry)))
    (checkpoint / CONFIG).write_text(to_yaml(Config()))
    (checkpoint / RNG_FILE).write_bytes(rng.encode({f"rank-0/{name}": state for name, state in rng.capture().items()}))
    for name in (TRAINER_STATE, DATALOADER):
        (checkpoint / name).write_text(json.dumps({"format": 1, "step": 1, "world_size": num_ranks, "state": {}}))
    write_manifest(checkpoint, hash_files(checkpoint, files_below(checkpoint)), CheckpointInfo(1), Disk())


def hf_config(geometry: ModelGeometry) -> dict[str, Any]:
    """Return a configuration for ``read_geometry``."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": geometry.num_layers,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.ffn_size,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "vocab_size": geometry.vocab_size,
        "tie_word_embeddings": geometry.tied_embeddings,
        "max_position_embeddings": 4096,
    }


def bytes_read(action: Callable[[], object]) -> tuple[int, float]:
    """Return the bytes that this process reads from disk during an action, and its seconds."""
    begun, before = time.perf_counter(), _bytes_read()
    action()
    return _bytes_read() - before, time.perf_counter() - begun


def _bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def check_alone(checkpoint: Path) -> None:
    """Check a checkpoint in one process: read every file for its hash, and every tensor for its values."""
    assert not verify_chain(checkpoint)
    forget(checkpoint)
    check_saved(checkpoint, {"actor": checkpoint / "actor"})


def check(checkpoint: Path) -> None:
    """Check a checkpoint like the ranks of a run before they resume. Collective over the world."""

    def first_rank(ask: Ask) -> None:
        checker = SharedChecker(ask, values=True)
        assert not checker.verify(checkpoint, hashes=True)
        checker.check_saved(checkpoint, {"actor": checkpoint / "actor"})

    lead(first_rank, serve, None)


def worker(checkpoint: Path, store: Path, rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    meeting = dist.FileStore(str(store), num_ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=600))
    dist.barrier()
    found = all_gather_json(bytes_read(lambda: check(checkpoint)))
    if rank == 0:
        store.with_suffix(".json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(folder: Path, checkpoint: Path, num_ranks: int) -> list[tuple[int, float]]:
    """Return bytes and seconds of every rank of a world."""
    forget(checkpoint)
    store, context = folder / f"store-{num_ranks}", multiprocessing.get_context("spawn")
    ranks = [context.Process(target=worker, args=(checkpoint, store, rank, num_ranks)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert not any(process.exitcode for process in ranks)
    return [(num_bytes, seconds) for num_bytes, seconds in json.loads(store.with_suffix(".json").read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--directory", default=None, help="a folder on a disk; the system's temporary one by default")
    args = parser.parse_args()
    # Files are large compared with the megabytes that the system reads ahead when a file is opened.
    geometry, worlds = (LARGE, (1, 4)) if args.quick else (replace(LARGE, num_layers=20), (1, 2, 8))
    with TemporaryDirectory(dir=args.directory) as name:
        folder = Path(name)
        checkpoint = folder / "checkpoint-1"
        write_checkpoint(checkpoint, geometry, worlds[-1])
        os.sync()
        forget(checkpoint)
        alone = bytes_read(lambda: check_alone(checkpoint))
        sizes = [path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()]
        total, largest, rows = sum(sizes), max(sizes), {}
        for num_ranks in worlds:
            found = measure(folder, checkpoint, num_ranks)
            read = [num_bytes for num_bytes, _ in found]
            assert sum(read) > 0.99 * total, "reads from this disk are not counted; choose another --directory"
            bound = total / num_ranks + largest
            seconds = max(seconds for _, seconds in found)
            rows[num_ranks] = {"bytes": read, "bound": bound, "ratio": max(read) / bound, "wall_s": seconds}
            print(
                f"{num_ranks} ranks: at most {max(read):,} bytes a rank, bound {bound:,.0f}, {seconds:.1f} s",
                flush=True,
            )
    details = {"total": total, "largest": largest, "alone": {"bytes": alone[0], "wall_s": alone[1]}, "worlds": rows}
    report("resume_check", details, ratio=max(row["ratio"] for row in rows.values()), goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
