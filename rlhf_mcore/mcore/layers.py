"""Layer specs, and the modules in them that are not Megatron's. With Transformer Engine its own modules; without it a local spec that
also runs on a CPU.

The local spec takes Megatron's linear layers and replaces two parts: the norm (torch's refuses sequence parallelism) and the core
attention (Megatron's refuses packed input). Under both, mixtures have a router whose load-balancing loss does not depend on how
ranks share the tokens, and a scalar head may stand in the place of the output layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear, gather_from_sequence_parallel_region
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
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.base import Family
from rlhf_mcore.mcore.delta_net import delta_net_spec
from rlhf_mcore.mcore.latent import LatentAttention, Rotary, local_attention_spec
from rlhf_mcore.mcore.norms import NormedAdd, ProjectionNorm, RMSNorm
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.mcore.weights import unwrap
from rlhf_mcore.parallel.context import chunks_of, gather_context, order_of_ranks
from rlhf_mcore.platform.megatron_versions import submodules_of

try:
    import transformer_engine  # noqa: F401

    HAVE_TE = True
except ImportError:
    HAVE_TE = False


class SDPACoreAttention(torch.nn.Module):
    """Causal attention over torch's scaled_dot_product_attention, for padded [s, b, heads, d] and packed [N, heads, d] input.

    Padding is on the right, so the causal mask alone keeps real tokens from seeing it. Under context parallelism a rank has a part of
    the tokens (``parallel/context.py``): its queries attend to the keys and values of all ranks, which are gathered. In layers to
    which Megatron's config gives a window, a token sees so many before it.
    """

    varlen: Callable[..., Any] | None = None  # one kernel for all packed sequences (``fast_kernels.py``)

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
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if has_window else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            held = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(held, dtype=config.params_dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Returns [s, b, heads * d], or [N, heads * d] for packed input, with d of the values."""
        cp = 1 if self._group is None else self._group.size()
        if self._group is not None:
            order = None if packed_seq_params is None else packed_seq_params.order
            if order is None:
                order = order_of_ranks([len(query) * cp], cp).to(query.device)
            key, value = (gather_context(x, order, self._group, sums_gradient=True) for x in (key, value))
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._attend(q, k, v)  # [b, heads, s, d]
            return out.permute(2, 0, 1, 3).flatten(2)
        if self.varlen is not None:
            return self._attend_packed(query, key, value, packed_seq_params)
        # Neighbours of one length are a batch. All are cut at once: the gradient of a slice is as long as what it is cut from.
        lengths, parts = packed_seq_params.sizes, []
        runs = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
        spans = [length * count for length, count in runs]
        cut = query.split([span // cp for span in spans]), key.split(spans), value.split(spans)
        for (length, count), q, k, v in zip(runs, *cut, strict=True):
            q = q.unflatten(0, (count, length // cp)).transpose(1, 2)
            k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (k, v))
            parts.append(self._attend(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> Tensor:
        """Attend by one kernel. To it a rank's two chunks of a sequence are two, and the last query of each sees its last key."""
        assert self.varlen is not None
        borders = seen_borders = packed.cu_seqlens_q
        longest, parts = packed.max_seqlen_q, 1
        if self._group is not None:
            parts = 2 * self._group.size()
            borders, seen_borders, seen = packed.seen_by_chunks(self._group.rank(), self._group.size())
            k, v = (x.index_select(0, seen) for x in (k, v))
        window = (-1 if self._window is None else self._window - 1, 0)
        shares = q.size(1) != k.size(1)
        out: Tensor = self.varlen(
            q,
            k,
            v,
            borders,
            seen_borders,
            longest // parts,
            longest,
            scale=self._scale,
            window_size=window,
            enable_gqa=shares,
        )
        return out.flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._group is None:
            return self._attend_last(q, k, v)
        parts = []
        for part, number in zip(q.chunk(2, dim=2), chunks_of(self._group.rank(), self._group.size()), strict=True):
            end = (number + 1) * part.size(2)
            parts.append(self._attend_last(part, k[:, :, :end], v[:, :, :end]))
        return torch.cat(parts, dim=2)

    def _attend_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries of the last tokens, keys and values of all."""
        shares, total, mask, scale = q.size(1) != k.size(1), k.size(2), None, self._scale
        before, window = total - q.size(2), self._window or total
        if before or total > window:
            mask = (
                torch.ones(q.size(2), total, dtype=torch.bool, device=q.device).tril(before).triu(before + 1 - window)
            )
        if (sinks := self.softmax_offset) is not None:
            scale = scale or q.size(-1) ** -0.5
            q, k, v = _with_sinks(q, k, v, sinks / scale)
            mask = mask if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shares
        )
        return out if sinks is None else out[:, :, 1:]


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A token in front of [b, heads, s, d], which all see and whose value is zero: its products with queries are ``sinks`` [heads].

    So a head's weights add up to less than one by what it gives to its sink, as OpenAI 2025 (arXiv 2508.10925) has it, in any kernel.
    """
    q = torch.cat([q, sinks[None, :, None, None].expand(*q.shape[:-1], 1)], dim=-1)
    k = F.pad(F.pad(k, (0, 1)), (0, 0, 1, 0))
    token = torch.zeros(k.size(-1), dtype=k.dtype, device=k.device)
    token[-1] = 1.0
    k = torch.cat([token.expand(*k.shape[:2], 1, -1), k[:, :, 1:]], dim=2)
    return F.pad(q, (0, 0, 1, 0)), k, F.pad(v, (0, 0, 1, 0))


class Attention(SelfAttention):
    """Megatron's, whose rotation may be another one in some layers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.rotation: Rotary | None = None  # that of the model

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> tuple:
        if self.rotation is not None and rotary_pos_emb is not None:
            is_packed = kwargs.get("packed_seq_params") is not None
            parts = 1 if is_packed else self.pg_collection.cp.size()
            rotary_pos_emb = self.rotation(len(rotary_pos_emb) * parts, packed_seq=is_packed)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class GatedAttention(SelfAttention):
    """Megatron's, whose output is multiplied with gates: where a rank has some heads of a group, it gets the gates of all."""

    def get_query_key_value_tensors(self, *args: Any, output_gate: bool = False, **kwargs: Any) -> Any:
        *qkv, gate = super().get_query_key_value_tensors(*args, output_gate=True, **kwargs)
        held, rank = qkv[0].size(2), self.pg_collection.tp.rank()
        parts = gate.split(held, dim=2)
        return (*qkv, parts[rank % len(parts)])


class ProjectionNormAttention(Attention):
    """With norms of the whole projections to queries and to keys."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        assert config.num_query_groups is not None
        self.q_layernorm = ProjectionNorm(config, config.num_attention_heads, self.pg_collection.tp)
        self.k_layernorm = ProjectionNorm(config, config.num_query_groups, self.pg_collection.tp)


def taking_turns(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A linear layer whose rows are of gate and linear part in turn: what it returns is all of the gate, then the linear part."""

    class TakingTurns(linear):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
            return tuple(
                x if x is None else x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in super().forward(*args, **kwargs)
            )

    return TakingTurns


class BiasedExpertOutput(RowParallelLinear):
    """Megatron adds the bias of an expert, times the expert's weight, to what this returns in place: it must not be a view."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


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

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.moe_router_num_groups and config.moe_router_score_function == "softmax":
            if config.moe_router_fusion:
                raise ConfigError("moe_router_fusion chooses other groups of experts than this model; remove it")
            self.router_replay = _BestExpertOfGroups()

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
            self.assigned = self.assigned + real.sum(dim=0)


class _BestExpertOfGroups:
    """Where Megatron asks a replayed routing for experts: those of the groups with the best expert each.

    Megatron's own adds up the scores of as many experts of a group as are taken of one.
    """

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, compute_topk: Callable[..., tuple]
    ) -> tuple[Tensor, Tensor]:
        """Values and numbers [n, topk] of the experts that tokens go to, of ``scores`` [n, experts]."""
        groups = scores.unflatten(1, (num_groups, -1))
        best = groups.amax(-1).topk(group_topk, dim=-1).indices
        chosen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        return torch.topk(groups.masked_fill(~chosen[..., None], 0.0).flatten(1), k=topk, dim=1)


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


def scale_embeddings(embedding: torch.nn.Module, factor: float) -> None:
    """Multiply what an embedding returns, in its dtype: the output layer may share its weight and is not scaled."""
    embedding.register_forward_hook(lambda module, inputs, output: output * torch.tensor(factor, dtype=output.dtype))


def set_window_frequencies(chunk: GPTModel, inv_freq: Tensor | None) -> None:
    """Give the layers of a chunk that have a window rotary frequencies [head_dim / 2] of their own; None: they have the model's."""
    rotation = None if inv_freq is None else Rotary(chunk.rotary_pos_emb, inv_freq)
    for layer in chunk.decoder.layers:
        windows = chunk.config.window_size, chunk.config.window_attn_skip_freq
        if rotation is not None and is_layer_window_attention(*windows, layer.layer_number):
            layer.self_attention.rotation = rotation


def use_te(kind: str) -> bool:
    """Whether ``model.layer_spec`` means Transformer Engine here ("auto": when it is installed)."""
    return kind == "te" or (kind == "auto" and HAVE_TE)


def decoder_spec(
    config: TransformerConfig, kind: str, family: Family, *, pp_rank: int, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The layers of one model chunk; ``kind`` is "te", "local" or "auto"."""
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))
    kinds = [(_is_moe(config, number), _is_delta(config, number)) for number in numbers]
    specs = {(moe, delta): layer_spec(config, kind, family, moe=moe, delta=delta) for moe, delta in set(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[k] for k in kinds], layer_norm=norm_and_linear(kind)[0])


def layer_spec(config: TransformerConfig, kind: str, family: Family, *, moe: bool, delta: bool = False) -> ModuleSpec:
    """One layer: with experts, with a gated delta net."""
    te = use_te(kind)
    spec = (_te_spec if te else _local_spec)(config, family, moe=moe)
    _adapt(spec.submodules, config, family)
    if delta:
        _use_delta_net(spec.submodules, te)
    return spec


def norm_and_linear(kind: str) -> tuple[type[torch.nn.Module], type[torch.nn.Module]]:
    """A norm that stands alone, and a linear layer whose outputs are split."""
    if not use_te(kind):
        return RMSNorm, LocalSpecProvider().column_parallel_linear()
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    return TENorm, TEColumnParallelLinear


def _use_delta_net(layer: TransformerLayerSubmodules, te: bool) -> None:
    backend: Any = LocalSpecProvider()
    if te:
        from megatron.core.extensions.transformer_engine import TENorm
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        layer.input_layernorm, backend = TENorm, TESpecProvider()
    layer.self_attention = delta_net_spec(backend.column_parallel_linear(), backend.row_parallel_linear())


def _adapt(layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family) -> None:
    """Give a layer what its family has beside Megatron's: norms of outputs, instead of inputs or too, and its attention."""
    if family.norms == "outputs":
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if family.norms != "inputs":
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(NormedAdd, {"config": config})
    if family.windows is not None:
        layer.self_attention.module = Attention
    if config.attention_output_gate:
        layer.self_attention.module = GatedAttention
    if family.has_stacked_experts:
        experts = submodules_of(submodules_of(layer.mlp).experts)
        experts.linear_fc1 = taking_turns(experts.linear_fc1)
        if experts.linear_fc2 is RowParallelLinear:
            experts.linear_fc2 = BiasedExpertOutput
    if family.norm_of_projections:
        layer.self_attention.module = ProjectionNormAttention
        layer.self_attention.submodules.q_layernorm = layer.self_attention.submodules.k_layernorm = IdentityOp


def _is_moe(config: TransformerConfig, layer: int) -> bool:
    frequency = config.moe_layer_freq
    return config.num_moe_experts is not None and (isinstance(frequency, int) or bool(frequency[layer]))


def _is_delta(config: TransformerConfig, layer: int) -> bool:
    return isinstance(config.linear_attention_freq, list) and bool(config.linear_attention_freq[layer])


def _te_spec(config: TransformerConfig, family: Family, *, moe: bool) -> ModuleSpec:
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
    if family.norms == "outputs":  # and none is a part of the linear layers
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

        spec.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        submodules_of(spec.submodules.mlp).linear_fc1 = TEColumnParallelLinear
    return spec


def _local_spec(config: TransformerConfig, family: Family, *, moe: bool) -> ModuleSpec:
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
    """The routers of a model's chunks, layer by layer; not those of MTP layers."""
    for chunk in chunks:
        yield from (module for module in unwrap(chunk).decoder.modules() if isinstance(module, Router))
