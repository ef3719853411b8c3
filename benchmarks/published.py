"""Read published quantised weights at four ranks, and compare the bytes that ranks read with the bytes they need.

A synthetic model of 6 layers is stored in bf16 and in each format. Its ranks (TP2, EP2) are loaded one after the other, each in
a process of its own. Needed: the values of a rank's rectangles, and one scale for every block that a rectangle intersects. The
ratio is the largest read / needed over ranks and formats. The details have CPU seconds, and the peak of the process's memory
above the rank's parameters. It contains the mapped pages of the file, about as many bytes as are read. They also say whether the
loaded values equal the values of another reader: transformers for fp8, compressed-tensors for int4 and int8.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import report
from rlhf_mcore.bridge.files import hf_files
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, LocalParameter, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from tests.trainer_layout import stage_names

GOAL = 1.05
LAYOUT = ParallelLayout(4, tp=2, ep=2, etp=1, sequence_parallel=True)
GROUP, BLOCK = 32, 128
Stored = dict[str, Tensor]


def geometry(quick: bool) -> ModelGeometry:
    return ModelGeometry(
        family="qwen3_moe",
        num_layers=1 if quick else 6,
        hidden_size=1024,
        ffn_size=2048,
        vocab_size=4096,
        tied_embeddings=False,
        head="lm",
        max_positions=4096,
        attention=GroupedSizes(num_heads=16, num_kv_heads=4, head_dim=64, has_qk_norm=True),
        experts=ExpertSizes(count=8, ffn_size=768, per_token=2),
    )


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def fp8(name: str, weight: Tensor) -> Stored:
    blocks = weight.float().unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    return {name: values, f"{name}_scale_inv": scales}


def compressor_of(kind: str, args: dict[str, Any]) -> Callable[[str, Tensor], Stored]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme, compressor = (
        QuantizationScheme(targets=["Linear"], weights=args),
        BaseCompressor.get_value_from_registry(kind),
    )

    def store(name: str, weight: Tensor) -> Stored:
        grouped = weight.unflatten(-1, (-1, args.get("group_size") or weight.shape[1]))
        scale = (grouped.abs().amax(-1).float() / (2 ** (args["num_bits"] - 1) - 1)).bfloat16()
        parts = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        return {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}

    return store


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": INT4}},
    },
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"g": {"weights": INT8}},
    },
}


def write(directory: Path, name: str, model: ModelGeometry) -> None:
    """Write the model in a format, and its dequantised values by another reader."""
    store = {
        "fp8": fp8,
        "int4": compressor_of("pack-quantized", INT4),
        "int8": compressor_of("int-quantized", INT8),
    }.get(name)
    generator = torch.Generator().manual_seed(0)
    tensors: Stored = {}
    for tensor, shape in hf_shapes(model).items():
        weight = torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
        tensors |= store(tensor, weight) if store is not None and is_quantised(tensor) else {tensor: weight}
    directory.mkdir()
    save_file({key: value.contiguous() for key, value in tensors.items()}, directory / hf_files.SINGLE)
    config = {"quantization_config": CONFIGS[name]} if CONFIGS[name] else {}
    (directory / "config.json").write_text(json.dumps(config))


def read_elsewhere(name: str, stored: Stored, tensor: str) -> Tensor:
    """Return a whole tensor as another reader computes it."""
    if not is_quantised(tensor) or name == "bf16":
        return stored[tensor]
    if name == "fp8":
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        whole: Tensor = Fp8Dequantize(None)._dequantize_one(
            stored[tensor], stored[f"{tensor}_scale_inv"], torch.bfloat16
        )
        return whole
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    kind, args = ("pack-quantized", INT4) if name == "int4" else ("int-quantized", INT8)
    prefix = tensor.removesuffix("weight")
    parts = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    dequantised: Tensor = BaseCompressor.get_value_from_registry(kind).decompress(parts, scheme)["weight"]
    return dequantised


def needed_bytes(name: str, tensor: str, start: tuple[int, ...], shape: tuple[int, ...]) -> float:
    if name == "bf16" or not is_quantised(tensor):
        return 2 * prod(shape)
    rows, columns = ((start[i] + shape[i] - 1) // BLOCK - start[i] // BLOCK + 1 for i in (0, 1))
    scales = {"fp8": 4 * rows * columns, "int4": 2 * shape[0] * -(-shape[1] // GROUP), "int8": 2 * shape[0]}
    return prod(shape) * {"fp8": 1, "int4": 0.5, "int8": 1}[name] + scales[name]


class CountedSlice:
    """A slice of a stored tensor that counts the bytes read."""

    read = 0

    def __init__(self, part: Any) -> None:
        self._part = part
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, where: Any) -> Tensor:
        values: Tensor = self._part[where]
        CountedSlice.read += values.nbytes
        return values


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def load_rank(directory: Path, name: str, model: ModelGeometry, rank: int, send: Any) -> None:
    """Load one rank, and send what it took."""
    torch.set_num_threads(1)
    names = stage_names(model, LAYOUT, fused=False)[LAYOUT.coordinates(rank)["pp"]]
    parameters, needed, rectangles = [], 0.0, []
    for parameter in names:
        shard = LAYOUT.shard_of(parameter, rank)
        parts = pieces(parameter, model, shard)
        parameters.append(
            LocalParameter(parameter, torch.full((sum(p.numel for p in parts),), 1.0, dtype=torch.bfloat16), shard)
        )
        needed += sum(needed_bytes(name, part.hf_name, part.start, part.shape) for part in parts)
        rectangles.append(parts)
    opened = hf_files.HFReader._slice
    hf_files.HFReader._slice = lambda self, tensor: CountedSlice(opened(self, tensor))  # type: ignore[method-assign]
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present size
    before, start = status_bytes("VmRSS"), time.process_time()
    hf_files.load(parameters, model, hf_files.HFReader(directory))
    cpu_s = time.process_time() - start
    peak = status_bytes("VmHWM") - before
    stored = load_file(directory / hf_files.SINGLE)
    whole: Stored = {}
    equal = True
    for parameter, parts in zip(parameters, rectangles, strict=True):
        for part in parts:
            if part.hf_name not in whole:
                whole[part.hf_name] = read_elsewhere(name, stored, part.hf_name)
            equal &= torch.equal(hf_files.view(parameter.tensor, part), whole[part.hf_name][part.slices])
    num_bytes = sum(parameter.tensor.nbytes for parameter in parameters)
    send.put(
        {
            "read": CountedSlice.read,
            "needed": needed,
            "peak": peak,
            "parameters": num_bytes,
            "cpu_s": cpu_s,
            "equal": equal,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 layer instead of 6")
    args = parser.parse_args()
    model, context, formats = geometry(args.quick), multiprocessing.get_context("spawn"), {}
    with TemporaryDirectory() as folder:
        for name in CONFIGS:
            write(Path(folder) / name, name, model)
            ranks = []
            for rank in range(LAYOUT.world_size):
                queue = context.Queue()
                process = context.Process(target=load_rank, args=(Path(folder) / name, name, model, rank, queue))
                process.start()
                ranks.append(queue.get())
                process.join()
            formats[name] = {
                "read_by_needed": max(rank["read"] / rank["needed"] for rank in ranks),
                "read_mb_per_rank": max(rank["read"] for rank in ranks) / 1e6,
                "peak_mb": max(rank["peak"] for rank in ranks) / 1e6,
                "parameters_mb": max(rank["parameters"] for rank in ranks) / 1e6,
                "cpu_s": max(rank["cpu_s"] for rank in ranks),
                "equal": all(rank["equal"] for rank in ranks),
            }
            print(name, formats[name])
    report(
        "published",
        {"formats": formats},
        ratio=max(row["read_by_needed"] for row in formats.values()),
        goal=GOAL,
        quick=args.quick,
    )


if __name__ == "__main__":
    main()
