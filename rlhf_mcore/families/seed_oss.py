"""Seed-OSS (ByteDance 2025): biases on queries, keys and values."""

from rlhf_mcore.families.base import DECODER, QKV_BIAS, Family

FAMILY = Family(
    "seed_oss",
    "SeedOss",
    DECODER + QKV_BIAS,
    megatron={"add_qkv_bias": True},
    head_dim=128,
    flags={"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
)
