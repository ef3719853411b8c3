"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv 2407.10671): biases on queries, keys and values."""

from rlhf_mcore.families.base import DECODER, QKV_BIAS, Family

FAMILY = Family(
    "qwen2",
    "Qwen2",
    DECODER + QKV_BIAS,
    megatron={"add_qkv_bias": True},
    flags={"qk_norm": False},  # only vLLM reads it
    default_window=4096,
)
