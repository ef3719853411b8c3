"""Qwen3-Next (Qwen Team 2025): three of four layers use a gated delta net, the fourth gated attention; all have experts."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.delta import DeltaNet
from rlhf_mcore.families.hybrid import BETA_ALPHA, GATED_DECODER, GATED_FLAGS, HYBRID_SETTINGS, QKVZ, delta_net
from rlhf_mcore.families.mixture import Mixture, experts, shared_expert

FAMILY = Family(
    "qwen3_next",
    "Qwen3Next",
    GATED_DECODER
    + delta_net("delta_by_head", in_proj_qkvz=QKVZ, in_proj_ba=BETA_ALPHA)
    + experts("mlp")
    + shared_expert("mlp.shared_expert", gate="mlp.shared_expert_gate"),
    megatron={**HYBRID_SETTINGS, "moe_shared_expert_gate": True},
    head_dim=256,
    delta=DeltaNet(),
    mixture=Mixture("moe_intermediate_size", top_k=10, has_dense_layers=True, shared_ffn=512, renormalises=True),
    flags={"attention_bias": False, **GATED_FLAGS},
    rotates_partly=True,
    window_switch="use_sliding_window",
)
