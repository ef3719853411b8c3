"""Measure memory and time of ``rlhf-mcore convert`` on a model of 2 GB, with an embedding of 0.5 GB.

    python -m benchmarks.convert [--quick]

Each conversion runs in a separate process, in turn with the others, ``ROUNDS`` times. Its peak is the largest resident set in the
kernel's count, including pages mapped from files. ``save_file`` is a process with the whole model in memory, which only writes it with
safetensors and fsyncs. No conversion can be faster, but ``save_file`` needs memory for the whole model.

The result is the largest peak over 600 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import report
from rlhf_mcore.bridge.files.tensor_files import ShardFiles, cut_into_shards, write_index
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.readers.model_files import read_geometry

ROOT = Path(__file__).resolve().parents[1]
LIMIT_BYTES = 600e6
ROUNDS = 2
RANKS = 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 14,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QUICK = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "vocab_size": 32000,
}
CONVERSIONS = {
    "hf -> hf": ("hf", "hf", "hf"),
    "hf -> megatron": ("hf", "megatron", "hf"),
    "megatron -> hf": ("megatron", "hf", "megatron"),
    "fsdp -> hf": ("fsdp", "hf", "fsdp"),
    "fsdp -> megatron": ("fsdp", "megatron", "fsdp"),
}


def make_hf(directory: Path, config: dict[str, Any]) -> None:
    """Write a model with random bf16 weights to one file."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    types = {name: (torch.bfloat16, shape) for name, shape in hf_shapes(read_geometry(directory)).items()}
    shards = cut_into_shards({name: prod(shape) * 2 for name, (_, shape) in types.items()}, 1, 2**40)
    files = ShardFiles(directory, shards, types)
    for name, (_, shape) in types.items():
        files.write(name, torch.randn(shape).bfloat16())
    files.close()
    write_index(directory, shards, types)


def make_fsdp(source: Path, directory: Path) -> None:
    """Write the same model in the format that ``RANKS`` FSDP ranks save."""
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    (directory / "huggingface").mkdir(parents=True)
    (directory / "huggingface" / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        mesh = init_device_mesh("cpu", (RANKS,))
        local = {
            name: DTensor.from_local(
                tensor.chunk(RANKS)[rank].clone(), mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
            )
            for name, tensor in tensors.items()
        }
        torch.save(local, directory / f"model_world_size_{RANKS}_rank_{rank}.pt")  # noqa: TID251 (the format of others)
        dist.destroy_process_group()


def save_file_alone(source: Path, target: Path) -> None:
    """Write a model from memory with safetensors, and print the seconds."""
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
    wall, cpu = time.perf_counter(), time.process_time()
    save_file(tensors, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    print(json.dumps({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}))


def run(command: Sequence[str]) -> dict[str, float]:
    """Run a process. Returns its seconds and its largest resident set."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begin = time.perf_counter()
    child = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True)
    output = child.stdout.read() if child.stdout else ""
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise RuntimeError(f"{' '.join(command)} failed")
    whole = {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024.0}
    return {**whole, **(json.loads(output) if output else {})}


def measure(root: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Run all conversions in turn. The first conversion to megatron writes the megatron source."""
    found: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        alone = ["-m", "benchmarks.convert", "--save-file", str(root / "hf"), str(root / "alone.safetensors")]
        found.setdefault("save_file", []).append(run(alone))
        for name, (source_format, target_format, source) in CONVERSIONS.items():
            target = root / ("megatron" if name == "hf -> megatron" else "out")
            options = ["--from", source_format, "--to", target_format, "--overwrite"]
            command = ["-m", "rlhf_mcore.cli.main", "convert", *options, str(root / source), str(target)]
            found.setdefault(name, []).append(run(command))
        found.setdefault("imports alone", []).append(run(["-c", "import rlhf_mcore.commands.convert.conversion"]))
    return found


def summarise(found: dict[str, list[dict[str, float]]], num_bytes: int, *, quick: bool) -> None:
    """Write medians and ratios to the result file."""
    rows = {
        name: {key: round(statistics.median(row[key] for row in runs), 3) for key in runs[0]}
        for name, runs in found.items()
    }
    for name in CONVERSIONS:
        row = rows[name]
        for kind in ("wall_s", "cpu_s"):
            ratios = [
                alone[kind] / (own[kind] - imports[kind])
                for alone, own, imports in zip(found["save_file"], found[name], found["imports alone"], strict=True)
            ]
            row[f"save_file_over_own_{kind}_without_imports"] = round(statistics.median(ratios), 3)
        print(f"{name:18} {row['wall_s']:6.2f} s, {row['cpu_s']:6.2f} s of CPU, peak {row['peak_bytes'] / 1e6:5.0f} MB")
    worst = max(row["peak_bytes"] for name in CONVERSIONS for row in found[name])
    report(
        "convert",
        {"model_bytes": num_bytes, "rounds": len(found["save_file"]), "rows": rows},
        ratio=worst / LIMIT_BYTES,
        goal=1.0,
        quick=quick,
    )


def main() -> None:
    """Build the models, measure, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, once")
    parser.add_argument("--save-file", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make-hf", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make-fsdp", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save_file:
        save_file_alone(*args.save_file)
        return
    if args.make_hf:
        make_hf(args.make_hf, {**CONFIG, **(QUICK if args.quick else {})})
        return
    if args.make_fsdp:
        make_fsdp(*args.make_fsdp)
        return
    with tempfile.TemporaryDirectory(prefix="convert-") as folder:
        root = Path(folder)
        # Runs in a separate process, because the kernel counts the size of a parent for its children.
        run(["-m", "benchmarks.convert", "--make-hf", str(root / "hf"), *(["--quick"] if args.quick else [])])
        num_bytes = (root / "hf" / "model.safetensors").stat().st_size
        run(["-m", "benchmarks.convert", "--make-fsdp", str(root / "hf"), str(root / "fsdp")])
        found = measure(root, 1 if args.quick else ROUNDS)
    summarise(found, num_bytes, quick=args.quick)


if __name__ == "__main__":
    main()
