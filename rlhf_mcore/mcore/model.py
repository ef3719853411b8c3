"""Building a Megatron model under a layout, and naming what lies on this rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
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
from rlhf_mcore.mcore.layers import decoder_spec, use_te
from rlhf_mcore.platform import Platform
from rlhf_mcore.types import LocalParameter, Shard


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


def build_model(spec: ModelSpec, groups: ModelGroups, platform: Platform, options: BuildOptions) -> MegatronModel:
    """Allocate the model; its weights are undefined until they are loaded. Collective over the model's ranks."""
    platform.prepare_megatron()
    with ambient(groups, platform):
        model_parallel_cuda_manual_seed(
            options.seed, tp_rank=groups.tp_rank, ep_rank=0, etp_rank=groups.tp_rank, force_reset_rng=True
        )
        config = transformer_config(
            spec,
            groups,
            platform,
            dtype=options.dtype,
            recompute=options.recompute,
            fused=use_te(options.layer_spec),
            deterministic=options.deterministic,
        )
        stages: list[int | None] = [None] if groups.layout.vpp is None else list(range(groups.layout.vpp))
        chunks = [_build_chunk(spec, groups, config, options, stage) for stage in stages]
        chunks = [_wrap(chunk.to(platform.device()), config, groups, options.trainable) for chunk in chunks]
    return MegatronModel(spec, config, groups, platform, chunks)


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
    chunk.rotary_pos_emb.inv_freq = spec.inv_freq.to(chunk.rotary_pos_emb.inv_freq.device)
    _mark_tensor_parallel(chunk)
    return chunk


def _mark_tensor_parallel(chunk: GPTModel) -> None:
    """Say which weights are cut over tensor-parallel ranks.

    Megatron says it while initialising weights, which is skipped here because they are loaded; without it the gradient norm counts
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
    """Every trained tensor on this rank. Layers carry the number that the layer itself knows (uneven and interleaved pipelines)."""
    shard = Shard(model.groups.tp_rank, model.groups.layout.tp)
    found = []
    for chunk in map(unwrap, model.chunks):
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, tensor in chunk.named_parameters():
            found.append(LocalParameter(_global_name(name, numbers), tensor.data, shard))
    return found


def _global_name(name: str, layer_numbers: list[int]) -> str:
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{layer_numbers[int(m.group(1))]}.", name)
