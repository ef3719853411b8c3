"""Norms that Megatron lacks: RMSNorm on a CPU with sequence parallelism, norms of projections, norms after a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlhf_mcore.mcore.groups import Sum
from rlhf_mcore.platform import cpu_kernels


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467) over the last dimension, computed in fp32.

    Under sequence parallelism a rank processes a part of the tokens, so the weight's gradient is summed over
    tensor-parallel ranks. The attribute ``sequence_parallel`` requests this from Megatron. For norms of query and key
    heads, Megatron recognises the module's name instead.

    With Megatron's ``layernorm_zero_centered_gamma`` the norm multiplies by one plus the weight, in fp32 too.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any):
        super().__init__()
        self.eps, self._zero_centered = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if cpu_kernels.has_kernel(x) and self.weight.dtype == x.dtype:
            return cpu_kernels.rms_norm(x, 1.0 + self.weight if self._zero_centered else self.weight, self.eps)
        if x.is_cuda and not self._zero_centered:  # one kernel instead of five
            return self.weight * F.rms_norm(x, (x.size(-1),), eps=self.eps)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self._zero_centered:
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class ProjectionNorm(torch.nn.Module):
    """RMSNorm over all heads of a projection together. Input on a tensor-parallel rank: [..., its heads, head_dim].

    Every rank stores the whole weight [num_heads * head_dim]. Megatron recognises the module's name and sums the
    gradient over ranks. If there are fewer heads than ranks, several ranks hold the same head.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, group: dist.ProcessGroup):
        super().__init__()
        assert config.kv_channels is not None and config.qk_layernorm
        self.eps, self.num_heads, self._group = config.layernorm_epsilon, num_heads, group
        self.weight = torch.nn.Parameter(torch.ones(num_heads * config.kv_channels, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide, num_local, ranks = x.float(), x.size(-2), self._group.size()
        squares = wide.pow(2).sum((-2, -1), keepdim=True)
        if ranks > 1:  # correct for heads that several ranks count
            squares = Sum.apply(squares, self._group) * (self.num_heads / (num_local * ranks))
        normed = wide * torch.rsqrt(squares / self.weight.numel() + self.eps)
        first = self._group.rank() * self.num_heads // ranks
        return self.weight.view(self.num_heads, -1)[first : first + num_local] * normed.to(x.dtype)


class NormedAdd(torch.nn.Module):
    """Normalise the output of attention or of an MLP and add it to the residual, with Megatron's interface."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return a function of ((output, its bias or None), residual, dropout rate)."""
        add = get_bias_dropout_add(training, fused)

        def normed_add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            output = self.norm(output if bias is None else output + bias)
            return add((output, None), residual, dropout)

        return normed_add
