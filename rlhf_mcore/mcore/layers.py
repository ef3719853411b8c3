"""Layer specs, and the modules in them that are not Megatron's. With Transformer Engine its own modules; without it a local spec that
also runs on a CPU.

The local spec takes Megatron's linear layers and replaces two parts: the norm (torch's refuses sequence parallelism) and the core
attention (Megatron's refuses packed input). Under both, mixtures have a router whose load-balancing loss does not depend on how
ranks share the tokens, and a scalar head may stand in the place of the output layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from rlhf_mcore.mcore.latent import LatentAttention, local_attention_spec
from rlhf_mcore.parallel.context import chunks_of, gather_context
from rlhf_mcore.platform.megatron_versions import submodules_of

try:
    import transformer_engine  # noqa: F401

    HAVE_TE = True
except ImportError:
    HAVE_TE = False


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467) over the last dimension, computed in fp32.

    Under sequence parallelism a rank sees a part of the tokens, so its weight's gradient is summed over tensor-parallel ranks;
    the attribute ``sequence_parallel`` asks Megatron for that. Norms of query and key heads are summed by name instead.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class SDPACoreAttention(torch.nn.Module):
    """Causal attention over torch's scaled_dot_product_attention, for padded [s, b, heads, d] and packed [N, heads, d] input.

    Padding is on the right, so the causal mask alone keeps real tokens from seeing it. Under context parallelism a rank has a part of
    the tokens (``parallel/context.py``): its queries attend to the keys and values of all ranks, which are gathered.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        self._scale = softmax_scale
        self._group = pg_collection.cp if pg_collection is not None and pg_collection.cp.size() > 1 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Returns [s, b, heads * d], or [N, heads * d] for packed input, with d of the values."""
        cp = 1 if self._group is None else self._group.size()
        if self._group is not None:
            sizes = [len(query) * cp] if packed_seq_params is None else packed_seq_params.cu_seqlens_q.diff().tolist()
            key, value = (gather_context(x, sizes, self._group, sums_gradient=True) for x in (key, value))
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._attend(q, k, v)  # [b, heads, s, d]
            return out.permute(2, 0, 1, 3).flatten(2)
        borders, parts = packed_seq_params.cu_seqlens_q.tolist(), []
        lengths = [end - begin for begin, end in itertools.pairwise(borders)]
        begin = 0
        for length, same in itertools.groupby(lengths):  # neighbours of one length are a batch
            count = len(list(same))
            end = begin + count * length
            q = query[begin // cp : end // cp].unflatten(0, (count, length // cp)).transpose(1, 2)
            k, v = (x[begin:end].unflatten(0, (count, length)).transpose(1, 2) for x in (key, value))
            parts.append(self._attend(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
            begin = end
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = partial(F.scaled_dot_product_attention, scale=self._scale, enable_gqa=q.size(1) != k.size(1))
        if self._group is None:
            return attend(q, k, v, is_causal=True)
        parts = []
        for part, number in zip(q.chunk(2, dim=2), chunks_of(self._group.rank(), self._group.size()), strict=True):
            length = part.size(2)
            end = (number + 1) * length
            mask = torch.ones(length, end, dtype=torch.bool, device=q.device).tril(end - length)
            parts.append(attend(part, k[:, :, :end], v[:, :, :end], attn_mask=mask))
        return torch.cat(parts, dim=2)


class Router(TopKRouter):
    """Top-k router with the load-balancing loss of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, eq. 4-6).

    Of a microbatch of n tokens and E experts it is E * sum_e f_e * P_e, with f_e the fraction of the n * top_k assignments that
    went to expert e and P_e the mean router probability of e; 1 is perfect balance. Microbatches are weighted by n, padding does
    not count. Megatron's own multiplies by the tokens of one tensor-parallel rank, so its strength depends on the layout.

    ``balance_weight`` (set for each update) multiplies n times the loss; ``balance_sum`` collects this rank's part of n times the
    loss, over the microbatches since it was last set.

    ``assigned`` [E] counts this rank's tokens by expert over the microbatches of an update; None: they are not counted.
    """

    balance_weight: float = 0.0
    balance_sum: float | Tensor = 0.0
    assigned: Tensor | None = None

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Attach the loss to ``probs`` [n, E]; ``scores_for_aux_loss`` and ``routing_map`` [n, E] are zero at padding."""
        assigned = routing_map.sum(dim=0).float()
        dist.all_reduce(assigned, group=self.tp_cp_group)
        fractions = assigned / assigned.sum().clamp(min=1.0)
        # Other ranks of the group hold the other tokens, and add their own part of P_e.
        weighted = self.num_experts * (fractions * scores_for_aux_loss.sum(dim=0)).sum()
        self.balance_sum = self.balance_sum + weighted.detach()
        return MoEAuxLossAutoScaler.apply(probs, self.balance_weight * weighted)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count tokens [n, E], once where activations are recomputed. Megatron's own counts in 16 bits where weights have as many."""
        if self.assigned is not None and torch.is_grad_enabled():
            real = routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1)
            self.assigned = self.assigned.to(real.device) + real.sum(dim=0)


def move_expert_biases(routers: Iterable[Router], rate: float, group: dist.ProcessGroup) -> None:
    """Balancing without a loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1), from the tokens that routers have counted.

    The bias of an expert goes up by ``rate`` where it got fewer tokens than the mean over experts, and down where it got more.
    ``group`` joins the ranks that hold the same layers, each of which has counted its own tokens. Collective over it.
    """
    biases, assigned = [], []
    for router in routers:
        assert router.expert_bias is not None and router.assigned is not None
        biases.append(router.expert_bias)
        assigned.append(router.assigned)
    if not biases:  # a stage of dense layers
        return
    counts = torch.stack(assigned)
    dist.all_reduce(counts, group=group)
    moves = rate * torch.sign(counts.mean(dim=1, keepdim=True) - counts)
    for bias, move in zip(biases, moves, strict=True):
        bias.add_(move)


class ScalarHead(torch.nn.Module):
    """One number per token, in place of Megatron's output layer: values of a critic, scores of a reward model.

    It is small and whole on every tensor-parallel rank. Hidden states have their full gradient on each of these, so nothing is
    reduced on the way back; with sequence parallelism they are gathered first. Computed in fp32.
    """

    def __init__(self, config: TransformerConfig, tp_group: dist.ProcessGroup, *, has_bias: bool):
        super().__init__()
        self._tp = tp_group
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, dtype=config.params_dtype)) if has_bias else None

    def forward(self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None) -> tuple:
        """[T or T / tp, b, hidden] -> [T, b, 1] fp32, and None where a bias would be returned."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self._tp)
        bias = self.bias.float() if self.bias is not None else None
        return F.linear(hidden.float(), self.weight.float(), bias), None


def defer_logits(output_layer: torch.nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Let a model return the hidden states in front of its output layer, all of them on every tensor-parallel rank.

    Logits are then made where logprobs are computed, in chunks (``parallel/logprobs.py``), which also sums the gradient of the hidden
    states over these ranks.
    """
    gathers = bool(output_layer.sequence_parallel)

    def forward(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> tuple:
        if gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp_group)
        return hidden, None

    output_layer.forward = forward


def use_te(kind: str) -> bool:
    """Whether ``model.layer_spec`` means Transformer Engine here ("auto": when it is installed)."""
    return kind == "te" or (kind == "auto" and HAVE_TE)


def decoder_spec(
    config: TransformerConfig, kind: str, *, pp_rank: int, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """The layers of one model chunk; ``kind`` is "te", "local" or "auto"."""
    te = use_te(kind)
    if te and config.num_moe_experts is None:
        return _te_spec(config, moe=False)
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
    build = _te_spec if te else _local_spec
    if te:
        from megatron.core.extensions.transformer_engine import TENorm
    specs = {moe: build(config, moe=moe) for moe in {_is_moe(config, number) for number in numbers}}
    return TransformerBlockSubmodules(
        layer_specs=[specs[_is_moe(config, number)] for number in numbers], layer_norm=TENorm if te else RMSNorm
    )


def _is_moe(config: TransformerConfig, layer: int) -> bool:
    frequency = config.moe_layer_freq
    return config.num_moe_experts is not None and (isinstance(frequency, int) or bool(frequency[layer]))


def _te_spec(config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=moe,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    if config.multi_latent_attention:
        spec.submodules.self_attention.module = LatentAttention
    if moe:
        submodules_of(spec.submodules.mlp).router = Router
    return spec


def _local_spec(config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    backend = LocalSpecProvider()
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    if moe:  # one expert after the other
        mlp = get_moe_module_spec_for_backend(backend, config.num_moe_experts, moe_grouped_gemm=False)
        submodules_of(mlp).router = Router
    else:
        mlp = get_mlp_module_spec_for_backend(backend=backend)
    if config.multi_latent_attention:
        attention = local_attention_spec(RMSNorm, SDPACoreAttention)
    else:
        submodules = SelfAttentionSubmodules(
            linear_qkv=backend.column_parallel_linear(),
            core_attention=SDPACoreAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        )
        attention = ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[Router]:
    """The routers of a model's chunks, layer by layer."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Router))
