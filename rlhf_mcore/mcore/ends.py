"""Modify the two ends of a decoder: its embedding, and its output layer or scalar head."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor


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
