"""Mixture-of-experts layers: their spec, and a router whose load-balancing loss does not depend on how ranks share the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Router(TopKRouter):
    """Top-k softmax router with the load-balancing loss of Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, eq. 4-6).

    Of a microbatch of n tokens and E experts it is E * sum_e f_e * P_e, with f_e the fraction of the n * top_k assignments that
    went to expert e and P_e the mean router probability of e; 1 is perfect balance. Microbatches are weighted by n, padding does
    not count. Megatron's own multiplies by the tokens of one tensor-parallel rank, so its strength depends on the layout.

    ``balance_weight`` (set for each update) multiplies n times the loss; ``balance_sum`` collects this rank's part of n times the
    loss, over the microbatches since it was last set.
    """

    balance_weight: float = 0.0
    balance_sum: float | Tensor = 0.0

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
        """Megatron's compiles itself at its first call, to do nothing for families without an expert bias."""
        assert not self.enable_expert_bias


def moe_spec(num_experts: int) -> ModuleSpec:
    """The mixture of experts of the local layer spec: one expert after the other."""
    spec = get_moe_module_spec_for_backend(backend=LocalSpecProvider(), num_experts=num_experts, moe_grouped_gemm=False)
    return with_router(spec)


def with_router(spec: ModuleSpec) -> ModuleSpec:
    """A mixture-of-experts spec of Megatron's, with our router."""
    submodules: Any = spec.submodules
    submodules.router = Router
    return spec


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[Router]:
    """The routers of a model's chunks, layer by layer."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, Router))
