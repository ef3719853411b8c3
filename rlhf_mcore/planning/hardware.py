"""Devices by name, and what is assumed about how well they are used."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device of a node. Rates are peaks from the makers' data sheets, links in one direction."""

    name: str
    memory_bytes: int  # what torch reports as the device's total
    bf16_flops: float  # dense
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float  # to all other devices of the node together
    network_bytes_per_s: float  # this device's share of the node's network
    per_node: int = 8


GPUS = {
    # NVIDIA's data sheets of DGX H100, H200, A100 and B200: 400 Gb/s of network a GPU, 200 Gb/s with A100.
    "H100": Gpu("H100", int(79.1 * GIB), 989e12, 3.35e12, 450e9, 50e9),
    "H200": Gpu("H200", int(139.8 * GIB), 989e12, 4.8e12, 450e9, 50e9),
    "A100": Gpu("A100", int(79.15 * GIB), 312e12, 2.04e12, 300e9, 25e9),
    "A100-40": Gpu("A100-40", int(39.4 * GIB), 312e12, 1.56e12, 300e9, 25e9),
    "B200": Gpu("B200", int(178.3 * GIB), 2250e12, 8.0e12, 900e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What cannot be computed. The defaults err on the side of caution for memory."""

    reserve_bytes: int = int(2.5 * GIB)  # CUDA context, NCCL's and cuBLAS's buffers
    usable_memory: float = 0.95  # the allocator's holes
    train_efficiency: float = 0.4  # share of the peak reached in forward and backward passes of dense models
    moe_efficiency: float = 0.25  # and of mixtures of experts
    decode_efficiency: float = 0.6  # share of the memory's bandwidth reached while generating
    link_efficiency: float = 0.7  # share of a link's bandwidth reached in a sync
    mean_length: float = 0.5  # mean length of prompts and responses, as a share of the longest
    expert_imbalance: float = 1.25  # tokens of the busiest expert rank over their mean, for memory
