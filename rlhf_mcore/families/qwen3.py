"""Qwen3 (Yang et al. 2025, arXiv 2505.09388): a norm on every query and key head."""

from rlhf_mcore.families.base import DECODER, QK_NORM, Family

FAMILY = Family(
    "qwen3",
    "Qwen3",
    DECODER + QK_NORM,
    megatron={"qk_layernorm": True},
    head_dim=128,
    flags={"attention_bias": False, "mlp_bias": False},
    default_window=4096,
)
