"""Qwen3 with experts in every layer, or in some layers (Yang et al. 2025, arXiv 2505.09388)."""

from rlhf_mcore.families.base import DECODER, QK_NORM, Family
from rlhf_mcore.families.mixture import Mixture, experts

FAMILY = Family(
    "qwen3_moe",
    "Qwen3Moe",
    DECODER + QK_NORM + experts("mlp"),
    megatron={"qk_layernorm": True},
    mixture=Mixture("moe_intermediate_size", top_k=8, has_dense_layers=True),
    flags={"attention_bias": False, "mlp_bias": False},
    window_switch="use_sliding_window",
    default_window=4096,
)
