"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv 2407.10671): experts, and a shared expert with its own gate."""

from rlhf_mcore.families.base import DECODER, QKV_BIAS, Family
from rlhf_mcore.families.mixture import Mixture, experts, shared_expert

FAMILY = Family(
    "qwen2_moe",
    "Qwen2Moe",
    DECODER + QKV_BIAS + experts("mlp") + shared_expert("mlp.shared_expert", gate="mlp.shared_expert_gate"),
    megatron={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    mixture=Mixture("moe_intermediate_size", top_k=4, has_dense_layers=True, shared_ffn=5632),
    flags={"qkv_bias": True},
    window_switch="use_sliding_window",
    default_window=4096,
)
