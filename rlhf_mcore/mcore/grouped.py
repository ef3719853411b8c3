"""Compute all experts of a layer in one grouped matrix product, on a GPU without Transformer Engine.

The token counts of experts stay on the device. If ranks exchange tokens, the host reads the sizes of the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from rlhf_mcore.mcore.mixture import BiasedExpertOutput

_ALIGNED = 8  # elements: the kernel requires rows of 16 bytes, in bf16
_PLAIN = (ColumnParallelLinear, RowParallelLinear, BiasedExpertOutput)


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
    plain = type(linear) in _PLAIN or hasattr(linear, "arrange")
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
    """The same linear layer of all experts, for tokens sorted by expert.

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
