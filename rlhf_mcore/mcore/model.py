"""Building a Megatron model under a layout, and naming what this rank holds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.mcore.ambient import ambient
from rlhf_mcore.mcore.families import ModelSpec, transformer_config
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.heads import ScalarHead
from rlhf_mcore.mcore.layers import decoder_spec, use_te
from rlhf_mcore.platform import Platform
from rlhf_mcore.types import LocalParameter


@dataclass(slots=True)
class MegatronModel:
    """A model's chunks on this rank (one, or ``vpp`` of them), with all that is needed to run them.

    ``chunks`` are what Megatron's schedules take: DDP-wrapped for a trained model.
    """

    spec: ModelSpec
    config: TransformerConfig
    groups: ModelGroups
    platform: Platform
    chunks: list[torch.nn.Module]
    aux_loss_coef: float = 0.0  # of the load-balancing loss of a trained mixture-of-experts model

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp_rank == self.groups.layout.pp - 1


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How a model is built, beside its spec and groups."""

    dtype: str
    layer_spec: str
    recompute: RecomputeConfig
    trainable: bool
    deterministic: bool
    seed: int
    aux_loss_coef: float = 0.0


def build_model(spec: ModelSpec, groups: ModelGroups, platform: Platform, options: BuildOptions) -> MegatronModel:
    """Allocate the model; its weights are undefined until they are loaded. Collective over the model's ranks."""
    platform.prepare_megatron()
    with ambient(groups, platform):
        model_parallel_cuda_manual_seed(
            options.seed,
            tp_rank=groups.tp_rank,
            ep_rank=groups.collection.ep.rank(),
            etp_rank=groups.collection.expt_tp.rank(),
            force_reset_rng=True,
        )
        aux_loss_coef = options.aux_loss_coef if options.trainable and spec.geometry.num_experts else 0.0
        config = transformer_config(
            spec,
            groups,
            platform,
            dtype=options.dtype,
            recompute=options.recompute,
            fused=use_te(options.layer_spec),
            deterministic=options.deterministic,
            aux_loss_coef=aux_loss_coef,
        )
        stages: list[int | None] = [None] if groups.layout.vpp is None else list(range(groups.layout.vpp))
        chunks = [_build_chunk(spec, groups, config, options, stage) for stage in stages]
        chunks = [_wrap(chunk.to(platform.device()), config, groups, options.trainable) for chunk in chunks]
    return MegatronModel(spec, config, groups, platform, chunks, aux_loss_coef)


def _build_chunk(
    spec: ModelSpec, groups: ModelGroups, config: TransformerConfig, options: BuildOptions, vp_stage: int | None
) -> GPTModel:
    first = groups.pp_rank == 0 and vp_stage in (None, 0)
    last = groups.pp_rank == groups.layout.pp - 1 and vp_stage in (None, (groups.layout.vpp or 1) - 1)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, options.layer_spec, pp_rank=groups.pp_rank, vp_stage=vp_stage),
        vocab_size=spec.geometry.padded_vocab(groups.layout.tp),
        max_sequence_length=spec.hf_config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.geometry.tied_embeddings,
        position_embedding_type="rope",
        pg_collection=groups.collection,
        vp_stage=vp_stage,
    )
    if last and spec.geometry.head != "lm":
        chunk.output_layer = ScalarHead(config, groups.collection.tp, has_bias=spec.geometry.head == "token")
    chunk.rotary_pos_emb.inv_freq = spec.inv_freq.to(chunk.rotary_pos_emb.inv_freq.device)
    _mark_tensor_parallel(chunk)
    return chunk


def _mark_tensor_parallel(chunk: GPTModel) -> None:
    """Mark which weights are cut over tensor-parallel ranks.

    Megatron does it while initialising weights, which is skipped here because they are loaded; without it the gradient norm counts
    one rank's part only, and clipping is silently wrong.
    """
    for module in chunk.modules():
        dim = {ColumnParallelLinear: 0, VocabParallelEmbedding: 0, RowParallelLinear: 1}.get(type(module))
        weight = getattr(module, "weight", None)
        if dim is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, True, dim, 1)


def _wrap(chunk: GPTModel, config: TransformerConfig, groups: ModelGroups, trainable: bool) -> torch.nn.Module:
    module: torch.nn.Module = Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk
    if not trainable:
        return module.requires_grad_(False).eval()
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config=config, ddp_config=ddp, module=module, pg_collection=groups.collection)


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and precision wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def local_parameters(model: MegatronModel) -> list[LocalParameter]:
    """Every tensor of the model on this rank: parameters, and the buffers that are part of its state.

    Layers carry the number that the layer itself knows (uneven and interleaved pipelines); experts the number on this rank.
    """
    layout, rank = model.groups.layout, dist.get_rank()
    found = []
    for chunk in map(unwrap, model.chunks):
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, tensor in itertools.chain(chunk.named_parameters(), _state_buffers(chunk)):
            found.append(LocalParameter(_global_name(name, numbers), tensor.data, layout.shard_of(name, rank)))
    return found


def _state_buffers(chunk: GPTModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint must hold: none in the families so far, and none may be left behind unseen."""
    for prefix, module in chunk.named_modules():
        for name, tensor in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", tensor


def _global_name(name: str, layer_numbers: list[int]) -> str:
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{layer_numbers[int(m.group(1))]}.", name)
