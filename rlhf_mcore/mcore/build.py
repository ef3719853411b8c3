"""Build a Megatron model under a layout: its chunks with frequencies, scalar heads and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.geometry import LatentSizes
from rlhf_mcore.mcore.attention import set_latent_frequencies, set_window_frequencies
from rlhf_mcore.mcore.beside_mlp import put_beside_mlp
from rlhf_mcore.mcore.groups import ModelGroups, use_groups
from rlhf_mcore.mcore.indexed_attention import indexers
from rlhf_mcore.mcore.kernels import use_fast_kernels
from rlhf_mcore.mcore.layers import decoder_spec, use_te
from rlhf_mcore.mcore.mixture import drop_graphs, keep_biases_whole
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import ModelSpec, transformer_config
from rlhf_mcore.mcore.mtp import add_mtp_layers
from rlhf_mcore.mcore.overrides import Overrides, make_buffers
from rlhf_mcore.mcore.packed import rotate_packed, tell_of_padding
from rlhf_mcore.mcore.vision import add_vision
from rlhf_mcore.mcore.weights import mark_tensor_parallel
from rlhf_mcore.platform import Platform

if TYPE_CHECKING:
    from rlhf_mcore.data.images import ImageStore
    from rlhf_mcore.mcore.image_features import StepFeatures
    from rlhf_mcore.mcore.lora import Adapters
    from rlhf_mcore.mcore.mtp import MTPLearning


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Options for building a model, in addition to its spec and groups."""

    dtype: str
    layer_spec: str
    recompute: RecomputeConfig
    trainable: bool
    deterministic: bool
    seed: int
    aux_loss_coef: float = 0.0
    overrides: Overrides = field(default_factory=Overrides)
    freeze: Callable[[Sequence[torch.nn.Module]], None] | None = None  # freezes some weights
    logit_chunk_tokens: int | None = None  # None: parallel/logprobs.py chooses
    expert_bias_rate: float = 0.0
    microbatch_tokens: int = 0  # maximum tokens of a training microbatch; for ``tp_comm_overlap``
    mtp: MTPLearning | None = None
    indexer: str = "frozen"  # training of indexers: frozen, warm_up or sparse
    add_adapters: Callable[[Sequence[torch.nn.Module]], Adapters] | None = None  # it also freezes the weights
    images: ImageStore | None = None  # for models that read images
    kept: StepFeatures | None = None  # shared by all models of the process; None: a separate one
    trains_tower: bool = False


def build_model(spec: ModelSpec, groups: ModelGroups, platform: Platform, options: BuildOptions) -> MegatronModel:
    """Allocate a model. Its weights are undefined until they are loaded. Collective over the model's ranks.

    Raises:
        ConfigError: the machine lacks what ``options.overrides`` need, Megatron rejects them, or ``options.freeze``
            is invalid for this model.
    """
    if (tower := FAMILIES[spec.geometry.family].vision) is not None and tower.attends_within:
        # the other core attentions accept no mask for packed sequences
        options = replace(options, layer_spec="local")
    options.overrides.check(platform)
    # With a pipeline, MTP layers have a separate embedding. Its gradient is added to the other one's afterwards.
    can_overlap = groups.collection.dp_cp.size() > 1 and (options.mtp is None or groups.layout.pp == 1)
    # The gradient of a tower is computed after the decoder's gradients.
    if platform.name == "cuda" and options.trainable and can_overlap and not options.trains_tower:
        options = replace(options, overrides=options.overrides.overlapping())
    platform.prepare_megatron()
    if options.overrides.needs_one_shape:
        make_buffers(options.overrides, platform, groups.layout, options.microbatch_tokens, spec.geometry.hidden_size)
    rotate_packed()
    with use_groups(groups, platform):
        model_parallel_cuda_manual_seed(
            options.seed,
            tp_rank=groups.tp_rank,
            ep_rank=groups.collection.ep.rank(),
            etp_rank=groups.collection.expt_tp.rank(),
            force_reset_rng=True,
        )
        aux_loss_coef = options.aux_loss_coef if options.trainable and spec.geometry.experts is not None else 0.0
        config = transformer_config(
            spec,
            groups,
            platform,
            dtype=options.dtype,
            recompute=options.recompute,
            fused=use_te(options.layer_spec),
            deterministic=options.deterministic,
            aux_loss_coef=aux_loss_coef,
            overrides=options.overrides,
        )
        stages: list[int | None] = [None] if groups.layout.vpp is None else list(range(groups.layout.vpp))
        chunks = [_build_chunk(spec, groups, config, options, stage) for stage in stages]
        vision = None
        if spec.geometry.vision is not None:
            vision = add_vision(chunks, spec, groups, config, platform, options.images, options.kept)
        if options.indexer != "frozen":
            for attention in indexers(chunks):
                attention.learn(options.indexer)
        if options.freeze is not None:
            options.freeze(chunks)
        adapters = options.add_adapters(chunks) if options.add_adapters is not None else None
        chunks = [_wrap(chunk.to(platform.device()), config, groups, options) for chunk in chunks]
        modules = [module for chunk in chunks for module in chunk.modules()]
        if spec.geometry.experts is not None:
            keep_biases_whole(modules)
            drop_graphs(modules)
        tell_of_padding(modules)
        if platform.name == "cuda":
            use_fast_kernels(modules, config)
        # Otherwise Megatron would update the bias with every gradient, over its globals.
        config.moe_router_enable_expert_bias = False
    if options.trainable and options.overrides.wants("overlap_grad_reduce"):
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return MegatronModel(
        spec,
        config,
        groups,
        platform,
        chunks,
        aux_loss_coef,
        expert_bias_rate=options.expert_bias_rate if options.trainable else 0.0,
        overrides=options.overrides,
        logit_chunk_tokens=options.logit_chunk_tokens,
        mtp=options.mtp,
        indexer=options.indexer,
        adapters=adapters,
        vision=vision,
    )


def _build_chunk(
    spec: ModelSpec, groups: ModelGroups, config: TransformerConfig, options: BuildOptions, vp_stage: int | None
) -> GPTModel:
    first = groups.pp_rank == 0 and vp_stage in (None, 0)
    last = groups.pp_rank == groups.layout.pp - 1 and vp_stage in (None, (groups.layout.vpp or 1) - 1)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(
            config,
            options.layer_spec,
            spec.geometry,
            pp_rank=groups.pp_rank,
            vp_stage=vp_stage,
        ),
        vocab_size=spec.geometry.padded_vocab(groups.layout.tp),
        max_sequence_length=spec.hf_config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.geometry.tied_embeddings,
        position_embedding_type="rope" if FAMILIES[spec.geometry.family].rotates else "none",
        pg_collection=groups.collection,
        vp_stage=vp_stage,
    )
    if FAMILIES[spec.geometry.family].experts_beside_mlp:
        put_beside_mlp(chunk)
    if last and spec.geometry.head != "lm":
        chunk.output_layer = ScalarHead(config, groups.collection.tp, has_bias=spec.geometry.head == "token")
    elif last:
        defer_logits(chunk.output_layer, groups.collection.tp)
    if options.mtp is not None:
        family = FAMILIES[spec.geometry.family]
        add_mtp_layers(chunk, spec.geometry, groups, options.layer_spec, family, alone=options.mtp.alone)
    if isinstance(spec.geometry.attention, LatentSizes):
        set_latent_frequencies(chunk, spec.inv_freq, spec.rope_scale)
    elif FAMILIES[spec.geometry.family].rotates:
        chunk.rotary_pos_emb.inv_freq = spec.inv_freq.to(chunk.rotary_pos_emb.inv_freq.device)
        if spec.window_inv_freq is not None:
            set_window_frequencies(chunk, spec.window_inv_freq)
    if first and FAMILIES[spec.geometry.family].scales_embeddings:
        scale_embeddings(chunk.embedding, spec.geometry.hidden_size**0.5)
    mark_tensor_parallel(chunk)
    return chunk


def _wrap(chunk: GPTModel, config: TransformerConfig, groups: ModelGroups, options: BuildOptions) -> torch.nn.Module:
    module: torch.nn.Module = Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk
    if not options.trainable:
        return module.requires_grad_(False).eval()
    ddp = options.overrides.build(
        DistributedDataParallelConfig, use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp, module=module, pg_collection=groups.collection)
    if ddp.overlap_param_gather:
        wrapped.disable_forward_pre_hook(param_sync=False)  # until an update leaves weights to gather
    return wrapped


class ScalarHead(torch.nn.Module):
    """Compute one number per token instead of logits: a critic's value or a reward model's score.

    The head is small, so every tensor-parallel rank stores it whole. It computes in fp32. With sequence parallelism
    the hidden states are gathered first. Each rank computes their full gradient, so the backward pass reduces
    nothing.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup, *, has_bias: bool):
        super().__init__()
        self._tp = tp_group
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype)) if has_bias else None

    def forward(self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None) -> tuple:
        """Map hidden states [T or T / tp, b, hidden] to [T, b, 1] fp32. Also return None instead of a bias."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._tp)
        bias = self.bias.float() if self.bias is not None else None
        return F.linear(hidden.float(), self.weight.float(), bias), None


def defer_logits(output_layer: torch.nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Make a model return the input of its output layer: the hidden states, whole on every tensor-parallel rank.

    ``parallel/logprobs.py`` then computes the logits in chunks, together with the logprobs. It also sums the gradient
    of the hidden states over these ranks.
    """
    gathers = bool(output_layer.sequence_parallel)

    def forward(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple:
        if gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp_group)
        return hidden, None

    output_layer.forward = forward


def require_gradient(embedding: torch.nn.Module) -> None:
    """Make the outputs of a frozen embedding require a gradient.

    Recomputed layers have gradients only if their input has.
    """

    def require(_module: torch.nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    embedding.register_forward_hook(require)


def scale_embeddings(embedding: torch.nn.Module, factor: float) -> None:
    """Multiply the outputs of an embedding by ``factor``, in their dtype.

    The weight itself does not change, because the output layer may share it.
    """
    embedding.register_forward_hook(lambda module, inputs, output: output * torch.tensor(factor, dtype=output.dtype))
