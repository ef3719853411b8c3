"""The weights of a model on this rank, named for the bridge."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.types import LocalParameter


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and precision wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def local_parameters(chunks: Iterable[torch.nn.Module], layout: ParallelLayout) -> list[LocalParameter]:
    """Every tensor of a model on this rank: parameters, and the buffers that are part of its state.

    Layers are numbered over the whole model (by Megatron's ``layer_number``), experts within this rank.
    """
    rank = dist.get_rank()
    return [
        LocalParameter(full_name, tensor.data, layout.shard_of(name, rank))
        for chunk in map(unwrap, chunks)
        for name, full_name, tensor in global_names(chunk)
    ]


def global_names(chunk: GPTModel) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Its own name, that in the whole model, and the tensor, of all that ``local_parameters`` has."""
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    for name, tensor in itertools.chain(chunk.named_parameters(), _state_buffers(chunk)):
        yield name, _global_name(name, numbers), tensor


def _state_buffers(chunk: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint must hold: none in the families so far, and none may be left out silently."""
    for prefix, module in chunk.named_modules():
        for name, tensor in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", tensor


def _global_name(name: str, layer_numbers: list[int]) -> str:
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{layer_numbers[int(m.group(1))]}.", name)


def weight_storage(chunk: torch.nn.Module) -> list[Tensor]:
    """The tensors that hold a chunk's weights: flat buffers of one that is trained."""
    if isinstance(chunk, DistributedDataParallel):
        return [buffer.param_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return [*chunk.parameters(), *chunk.buffers()]
