"""Language models of Qwen3.5 with experts (Qwen Team 2026): Qwen3-Next's layers with separate input projections of the nets."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.delta import DeltaNet
from rlhf_mcore.families.hybrid import APART, GATED_DECODER, GATED_FLAGS, HYBRID_SETTINGS, delta_net
from rlhf_mcore.families.mixture import Mixture, experts, shared_expert

FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    GATED_DECODER
    + delta_net("delta", **APART)
    + experts("mlp")
    + shared_expert("mlp.shared_expert", gate="mlp.shared_expert_gate"),
    megatron={**HYBRID_SETTINGS, "moe_shared_expert_gate": True},
    head_dim=256,
    delta=DeltaNet(),
    mixture=Mixture("moe_intermediate_size", top_k=8, always_renormalises=True, shared_ffn=512),
    flags={"attention_bias": False, **GATED_FLAGS},
    rotates_partly=True,
    window_switch="use_sliding_window",
)
