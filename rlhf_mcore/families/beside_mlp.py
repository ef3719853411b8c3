"""Experts beside the MLP of a layer (Gemma 4 26B-A4B): their tensors, and their sizes in config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_mcore.families.base import HF_LAYER, HIDDEN, MEGATRON_LAYER, Dim, Kind, Rule, Spec
from rlhf_mcore.families.mixture import EXPERT_FFN, EXPERT_GATE_UP, EXPERTS, shared_expert
from rlhf_mcore.families.sizes import num_experts, size
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import ExpertSizes

_NORMS = {
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_output_norm": "post_feedforward_layernorm_2",
}
_ROUTER: dict[str, dict[str, tuple[Dim, ...]]] = {
    "weight": {HF_LAYER + "router.proj.weight": (EXPERTS, HIDDEN)},
    "scale": {HF_LAYER + "router.scale": (HIDDEN,)},
    "expert_scale": {HF_LAYER + "router.per_expert_scale": (EXPERTS,)},
}
_MATRICES: tuple[tuple[str, Kind, dict[str, tuple[Dim, ...]]], ...] = (
    ("1", "stacked_halves", {HF_LAYER + "experts.gate_up_proj": (EXPERTS, EXPERT_GATE_UP, HIDDEN)}),
    ("2", "stacked_columns", {HF_LAYER + "experts.down_proj": (EXPERTS, HIDDEN, EXPERT_FFN)}),
)
_SPECS: tuple[tuple[Spec, str], ...] = (
    ("local", "local_experts.{k}.linear_fc{n}.weight"),
    ("te", "linear_fc{n}.weight{k}"),
)


def with_experts_beside_mlp(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Replace a decoder's rule for the norm before experts by the rules of experts beside the MLP."""
    block = MEGATRON_LAYER + "mlp."
    return (
        *(rule for rule in rules if rule.layers != "moe"),
        *(Rule(f"{block}router.{name}", "replicated", tensors, "moe") for name, tensors in _ROUTER.items()),
        *(
            Rule(f"{block}{name}.weight", "replicated", {f"{HF_LAYER}{hf}.weight": (HIDDEN,)}, "moe")
            for name, hf in _NORMS.items()
        ),
        *shared_expert("mlp"),
        *(
            Rule(block + "experts." + name.replace("{n}", n), kind, tensors, "moe", spec)
            for spec, name in _SPECS
            for n, kind, tensors in _MATRICES
        ),
    )


@dataclass(frozen=True, slots=True)
class MixtureBesideMLP:
    """Experts with softmax routing in all layers or in none (``enable_moe_block``). The weights of a token add up to one."""

    replaces_mlp: ClassVar[bool] = False

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry. Return {} without experts."""
        if not hf_config.flag("enable_moe_block", default=False):
            return {}
        experts = ExpertSizes(
            count=num_experts(hf_config),
            ffn_size=size(hf_config, "moe_intermediate_size"),
            per_token=hf_config.integer("top_k_experts", 1, num_experts(hf_config)),
            shared_ffn_size=size(hf_config, "intermediate_size"),
        )
        return {"experts": experts}

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return the settings of Megatron's router."""
        return {}

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        sizes = self.sizes(hf_config)
        if not sizes and "num_experts" in hf_config:
            yield "num_experts without enable_moe_block is read differently by transformers and engines; remove it"
        if sizes and sizes["experts"].per_token == 1:
            yield "top_k_experts=1 with weights that add up to one cannot be learned; use another model"
