"""The two ends of a decoder: its embedding, and what stands in the place of its output layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor


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


def require_gradient(embedding: torch.nn.Module) -> None:
    """Let what a frozen embedding returns have a gradient: recomputed layers have gradients only if their input has."""

    def require(_module: torch.nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output

    embedding.register_forward_hook(require)


def scale_embeddings(embedding: torch.nn.Module, factor: float) -> None:
    """Multiply what an embedding returns, in its dtype: the output layer may share its weight and is not scaled."""
    embedding.register_forward_hook(lambda module, inputs, output: output * torch.tensor(factor, dtype=output.dtype))
