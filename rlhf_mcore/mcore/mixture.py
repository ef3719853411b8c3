"""MoE layers: a router with layout-independent load balancing, experts in the forms of families, and one product for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.base import Family
from rlhf_mcore.mcore.weights import unwrap
from rlhf_mcore.platform.megatron_versions import submodules_of

_ALIGNED = 8  # elements: the kernel requires rows of 16 bytes, in bf16


class Router(TopKRouter):
    """Top-k router with the load-balancing loss of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, eq. 4-6).

    For a microbatch of n tokens and E experts, the loss is E * sum_e f_e * P_e. Here f_e is the fraction of the n *
    top_k assignments to expert e, and P_e is its mean router probability. Perfect balance gives 1. Microbatches are
    weighted by n, and padding is excluded. Megatron's own loss multiplies by the tokens of one tensor-parallel rank,
    so its strength depends on the layout.

    ``balance_weight`` (set for each update) multiplies n times the loss. ``balance_sum`` accumulates this rank's part
    of n times the loss over microbatches.

    ``assigned`` [E] counts this rank's tokens per expert over the microbatches of an update, unless it is None.

    A token that several rows share (``data/prefixes.py``) counts once per row. ``enter`` sets the number of rows.
    """

    balance_weight: float = 0.0
    balance_sum: float | Tensor = 0.0
    assigned: Tensor | None = None
    router_replay: Any  # chooses the experts; None: the experts with the best scores

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.moe_router_num_groups and config.moe_router_score_function == "softmax":
            if config.moe_router_fusion:
                raise ConfigError(
                    "moe_router_fusion chooses different expert groups than this model requires; remove it"
                )
            self.router_replay = _BestExpertOfGroups()
        self._uses: Tensor | None = None  # rows per token in the current forward pass
        self._runs = False  # whether a forward pass is running that is not a recomputation
        self._waiting: deque[Tensor | None] = deque()  # uses of passes that will be recomputed

    def begin(self) -> None:
        """Clear state from the previous update, which may have stopped early."""
        self._waiting.clear()

    @contextmanager
    def enter(self, uses: Tensor | None) -> Iterator[None]:
        """Run a forward pass within this block. Each token is shared by ``uses`` [n] rows; None: by one row."""
        self._uses, self._runs = uses, True
        try:
            yield
        finally:
            self._runs = False

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Route tokens.

        A backward pass recomputes layers in the order of their forward passes. Those forward passes ran without
        gradients.
        """
        if not self._runs:
            self._uses = self._waiting.popleft() if self._waiting else None
        elif self.training and not torch.is_grad_enabled():
            self._waiting.append(self._uses)
        return super().forward(input, padding_mask)

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Attach the loss to ``probs`` [n, E].

        ``scores_for_aux_loss`` and ``routing_map`` [n, E] are zero for padding.
        """
        if self._uses is not None:
            routing_map, scores_for_aux_loss = (x * self._uses[:, None] for x in (routing_map, scores_for_aux_loss))
        assigned = routing_map.sum(dim=0).float()
        dist.all_reduce(assigned, group=self.tp_cp_group)
        fractions = assigned / assigned.sum().clamp(min=1.0)
        # Other ranks of the group hold the other tokens and add their own part of P_e.
        weighted = self.num_experts * (fractions * scores_for_aux_loss.sum(dim=0)).sum()
        self.balance_sum = self.balance_sum + weighted.detach()
        return MoEAuxLossAutoScaler.apply(probs, self.balance_weight * weighted)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count tokens [n, E], only once if activations are recomputed.

        Megatron's own counter uses 16 bits if the weights do.
        """
        if self.assigned is not None and torch.is_grad_enabled():
            real = routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1)
            counted = real if self._uses is None else real * self._uses[:, None]
            self.assigned = self.assigned + counted.sum(dim=0)


class ScaledRouter(Router):
    """Normalise and scale the input, and scale the weights of each expert (Gemma 4)."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.scale, self.expert_scale = (
            torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
            for size in (config.hidden_size, self.num_experts)
        )
        for parameter in (self.scale, self.expert_scale):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def gating(self, input: Tensor) -> Tensor:
        """Return logits of inputs [..., hidden]."""
        normed = F.rms_norm(input, input.shape[-1:], eps=self.config.layernorm_epsilon)
        logits: Tensor = super().gating(normed * self.scale * input.size(-1) ** -0.5)
        return logits

    def routing(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return probabilities [n, E], which do not add up to one, and the map of chosen experts [n, E]."""
        probs, routing_map = super().routing(*args, **kwargs)
        return probs * self.expert_scale.to(probs.dtype), routing_map


class _BestExpertOfGroups:
    """Choose experts only from the groups with the highest single scores. Megatron calls it as a replayed routing.

    Megatron's own rule compares sums instead. It adds as many top scores of a group as it selects experts per group.
    """

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, compute_topk: Callable[..., tuple]
    ) -> tuple[Tensor, Tensor]:
        """Return the values and indices [n, topk] of the chosen experts, from ``scores`` [n, experts]."""
        groups = scores.unflatten(1, (num_groups, -1))
        best = groups.amax(-1).topk(group_topk, dim=-1).indices
        chosen = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        return torch.topk(groups.masked_fill(~chosen[..., None], 0.0).flatten(1), k=topk, dim=1)


def move_expert_biases(routers: Iterable[Router], rate: float, group: dist.ProcessGroup) -> None:
    """Balance experts without a loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1), from the routers' token counts.

    The bias of an expert increases by ``rate`` if the expert got fewer tokens than the mean over experts, and
    decreases if it got more. ``group`` joins the ranks of the same layers, and each rank counted its own tokens.
    Collective over it.
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


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[Router]:
    """Yield the routers of a model's chunks in layer order, without MTP layers."""
    for chunk in chunks:
        yield from (module for module in unwrap(chunk).decoder.modules() if isinstance(module, Router))


def drop_graphs(modules: Iterable[torch.nn.Module]) -> None:
    """Make the dispatchers of MoE layers keep only the dtype of probabilities, which is all that Megatron reads later.

    The graph of a recomputed layer's probabilities ends at the layer's input, which holds the input's gradient. Each layer
    would keep both until its next forward pass.
    """
    for module in modules:
        if isinstance(module, MoELayer) and isinstance(module.token_dispatcher, MoEAlltoAllTokenDispatcher):
            dispatcher = module.token_dispatcher
            dispatcher.dispatch_preprocess = partial(_preprocess, dispatcher, dispatcher.dispatch_preprocess)


def _preprocess(
    dispatcher: MoEAlltoAllTokenDispatcher, preprocess: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    prepared = preprocess(*args, **kwargs)
    dispatcher.probs = dispatcher.probs.detach().new_empty(0)
    return prepared


def keep_biases_whole(modules: Iterable[torch.nn.Module]) -> None:
    """Keep the biases of experts in fp32 if the model's weights were converted to 16 bits."""
    for module in modules:
        if isinstance(module, Router):
            module._maintain_float32_expert_bias()


def use_mixture(mlp: ModuleSpec, family: Family) -> None:
    """Set our router and the family's form of experts in Megatron's MoE spec."""
    parts = submodules_of(mlp)
    parts.router = ScaledRouter if family.experts_beside_mlp else Router
    if "glu_linear_offset" in family.megatron:
        experts = submodules_of(parts.experts)
        experts.linear_fc1 = deinterleaved_linear(experts.linear_fc1)
        if experts.linear_fc2 is RowParallelLinear:
            experts.linear_fc2 = BiasedExpertOutput


def deinterleaved_linear(linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Derive a linear layer from one whose rows alternate between gate and linear part.

    Its output contains the whole gate, then the whole linear part.
    """

    class TakingTurns(linear):  # type: ignore[misc, valid-type]
        @staticmethod
        def arrange(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, 2)).mT.flatten(-2)

        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
            return tuple(x if x is None else self.arrange(x) for x in super().forward(*args, **kwargs))

    return TakingTurns


class BiasedExpertOutput(RowParallelLinear):
    """A row-parallel layer that copies its output.

    Megatron adds the bias of an expert, times the expert's weight, to the output in place. The output must not be a
    view.
    """

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


# ------------------------------------------------------------------------------------------- one product for all experts
# On a GPU without Transformer Engine. The token counts of experts stay on the device. If ranks exchange tokens, the host
# reads the sizes of the exchange.
def group_experts(layer: MoELayer) -> None:
    """Make a layer compute all its experts in one product.

    The layer does not change if its experts have adapters, or sizes that the kernel does not support.
    """
    experts = layer.experts
    if type(experts) is not SequentialMLP or experts.num_local_experts == 1:
        return
    linears = [linear for expert in experts.local_experts for linear in (expert.linear_fc1, expert.linear_fc2)]
    if all(_is_groupable(linear) for linear in linears):
        experts.__class__ = GroupedExperts
        if type(layer.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            layer.token_dispatcher.__class__ = DeviceCounts


def _is_groupable(linear: Any) -> bool:
    kinds = (ColumnParallelLinear, RowParallelLinear, BiasedExpertOutput)
    plain = type(linear) in kinds or hasattr(linear, "arrange")
    return plain and not linear._forward_hooks and all(size % _ALIGNED == 0 for size in linear.weight.shape)


class GroupedExperts(SequentialMLP):
    """Megatron's sequential experts, with one grouped product for each of their two linear layers."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Apply the experts to tokens [n, hidden], sorted by expert, and multiply by their probabilities [n]."""
        if not len(permuted_local_hidden_states):
            output: tuple[Tensor, None] = super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
            return output
        first = self.local_experts[0]
        layers = SimpleNamespace(
            config=self.config,
            activation_func=first.activation_func,
            linear_fc1=_Linear([expert.linear_fc1 for expert in self.local_experts], tokens_per_expert),
            linear_fc2=_Linear([expert.linear_fc2 for expert in self.local_experts], tokens_per_expert, permuted_probs),
        )
        return MLP.forward(layers, permuted_local_hidden_states, permuted_probs)


class _Linear(torch.nn.Module):
    """A linear layer of all experts, for tokens sorted by expert.

    It adds biases, times ``probs`` [n] if given.
    """

    def __init__(self, linears: list[Any], counts: Tensor, probs: Tensor | None = None):
        super().__init__()
        self._linears, self._counts, self._probs = linears, counts, probs

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        first, counts = self._linears[0], self._counts.to(x.device)  # some dispatchers keep them on the host
        ends = counts.cumsum(0, dtype=torch.int32)
        output: Tensor = _GroupedProduct.apply(x, ends, *(linear.weight for linear in self._linears))
        if first.bias is not None:
            biases = torch.stack([linear.bias for linear in self._linears])
            rows = biases.repeat_interleave(counts, dim=0, output_size=len(x))
            output += rows if self._probs is None else rows * self._probs.unsqueeze(-1)
        return first.arrange(output) if hasattr(first, "arrange") else output, None


class _GroupedProduct(torch.autograd.Function):
    """Multiply the rows of x [n, k] by one weight [m, k] per group; each of ``ends`` ends a group.

    The function saves the weights themselves for the backward pass. Stacked copies exist only while they are used.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return torch._grouped_mm(x, torch.stack(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad, of_x = grad.contiguous(), None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            of_x = torch._grouped_mm(grad, torch.stack(weights), offs=ends)
        if any(ctx.needs_input_grad[2:]):
            # Groups can start at any row only if rows are contiguous in memory in both matrices.
            of_weights = torch._grouped_mm(grad.t(), x.contiguous(), offs=ends).unbind()
        return of_x, None, *of_weights


class DeviceCounts(MoEAlltoAllTokenDispatcher):
    """Megatron's dispatcher, which here counts the tokens of each expert on the device only.

    Without an exchange, tokens are already sorted by expert. The dispatcher then does nothing, and the host never
    waits.
    """

    tokens_per_expert: Tensor | None

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if self._exchanges:
            super()._maybe_dtoh_and_synchronize(point, None)
        return tokens_per_expert

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor | None, ...]:
        if self._exchanges:
            dispatched: tuple[Tensor | None, ...] = super().dispatch_postprocess(global_input_tokens, global_probs)
            return dispatched
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return super().combine_preprocess(hidden_states) if self._exchanges else hidden_states

    @property
    def _exchanges(self) -> bool:
        return self.ep_size * self.tp_size > 1 or self.shared_experts is not None  # overlaps with an exchange
