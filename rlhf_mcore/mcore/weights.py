"""The weights of a model on this rank, under the names that the bridge uses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from rlhf_mcore.families.mtp import EMBEDDING, EMBEDDING_COPY
from rlhf_mcore.geometry import LocalParameter
from rlhf_mcore.parallel.layout import ParallelLayout, is_expert
from rlhf_mcore.platform.megatron_versions import MTP_INNER

_ADAPTER = re.compile(r".*\.lora_[abm]\d*")


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """Return the GPTModel inside DDP and precision wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def transformer_layers(chunk: GPTModel) -> list[Any]:
    """Return the layers of a chunk, including the layers inside its MTP layers."""
    beyond = chunk.mtp.layers if hasattr(chunk, "mtp") else ()
    return [*chunk.decoder.layers, *(getattr(layer, MTP_INNER) for layer in beyond)]


def local_parameters(chunks: Iterable[torch.nn.Module], layout: ParallelLayout) -> list[LocalParameter]:
    """List every tensor of a model on this rank except adapters: parameters, and buffers that are part of its state.

    Layers are numbered over the whole model (Megatron's ``layer_number``), followed by MTP layers. Experts are
    numbered within this rank.
    """
    return [one for one in _all_parameters(chunks, layout) if not _ADAPTER.fullmatch(one.name)]


def adapter_parameters(chunks: Iterable[torch.nn.Module], layout: ParallelLayout) -> list[LocalParameter]:
    """List the trained tensors of a model with adapters on this rank: A, B, magnitudes, and other trained weights."""
    return list(_all_parameters(chunks, layout, trained=True))


def _all_parameters(
    chunks: Iterable[torch.nn.Module], layout: ParallelLayout, *, trained: bool = False
) -> Iterator[LocalParameter]:
    rank = dist.get_rank()
    for chunk in map(unwrap, chunks):
        for name, full_name, tensor in global_names(chunk):
            if tensor.requires_grad or not trained:
                yield LocalParameter(full_name, tensor.data, layout.shard_of(name, rank))


def global_names(chunk: GPTModel) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield each tensor of ``local_parameters`` with its name in the chunk and its name in the whole model."""
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    for name, tensor in itertools.chain(chunk.named_parameters(), _state_buffers(chunk)):
        if name == EMBEDDING and not chunk.pre_process:
            yield name, EMBEDDING_COPY, tensor
        elif match := re.match(rf"mtp\.layers\.(\d+)\.(?:{MTP_INNER}\.)?", name):
            number = chunk.config.num_layers + int(match.group(1))
            yield name, f"decoder.layers.{number}.{name[match.end() :]}", tensor
        else:
            yield name, _global_name(name, numbers), tensor


def _state_buffers(chunk: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a checkpoint must contain, by name, such as the biases of experts."""
    for prefix, module in chunk.named_modules():
        for name, tensor in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", tensor


def _global_name(name: str, layer_numbers: list[int]) -> str:
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{layer_numbers[int(m.group(1))]}.", name)


def weight_storage(chunk: torch.nn.Module) -> list[Tensor]:
    """Return the tensors that store a chunk's weights.

    For a trained chunk, these are its flat buffers and its frozen parameters.
    """
    if isinstance(chunk, DistributedDataParallel):
        frozen = [parameter for parameter in chunk.parameters() if not parameter.requires_grad]
        return [*(buffer.param_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)), *frozen]
    return [*chunk.parameters(), *chunk.buffers()]


def mark_tensor_parallel(chunk: GPTModel) -> None:
    """Mark the weights that are sharded over tensor-parallel ranks.

    Megatron marks them when it initialises weights. We skip initialisation, because weights are loaded. Without the
    marks, the gradient norm includes only one rank's part, and clipping is silently wrong.
    """
    for module in chunk.modules():
        if (sinks := getattr(module, "softmax_offset", None)) is not None:
            set_tensor_model_parallel_attributes(sinks, True, 0, 1)
        kinds = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}
        dim = next((dim for kind, dim in kinds.items() if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if dim is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)
    for name, parameter in chunk.named_parameters():
        if is_expert(name) and name.rpartition(".")[2].startswith("bias"):
            # Ranks that share tokens have different experts. The gradients of these biases are not summed over them,
            # and the norm includes all of them.
            parameter.sequence_parallel = False
            parameter.tensor_model_parallel = True
