"""Experts beside the MLP of a layer, each with norms of input and output (Gemma 4)."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rlhf_mcore.mcore.layers import RMSNorm


class ExpertsBesideMLP(MoELayer):
    """Add the normalised outputs of the MLP, which is Megatron's shared expert, and of the routed experts.

    The layer's input is not normalised. The MLP, the experts and the router normalise it, each with other weights.
    """

    def add_norms(self) -> None:
        """Add the norms to a layer that Megatron has built."""
        assert self.shared_experts is not None and not self.shared_expert_overlap
        self.mlp_norm, self.mlp_output_norm, self.experts_norm, self.experts_output_norm = (
            RMSNorm(self.config, self.config.hidden_size, eps=self.config.layernorm_epsilon) for _ in range(4)
        )

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self.mlp_output_norm(super().shared_experts_compute(self.mlp_norm(hidden_states)))
        return output

    def preprocess(self, hidden_states: Tensor, *args: Any) -> Any:
        return super().preprocess(self.experts_norm(hidden_states), *args)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor) -> Tensor:
        routed: Tensor = self.experts_output_norm(super().postprocess(output, None))
        return routed + shared_expert_output


def put_beside_mlp(chunk: GPTModel) -> None:
    """Change the layers with experts of a chunk. Megatron only passes its groups to layers of its own class."""
    for layer in chunk.decoder.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.__class__ = ExpertsBesideMLP
            layer.mlp.add_norms()
