"""OLMo-2 (OLMo Team 2025, arXiv 2501.00656): norms of outputs instead of inputs, and norms of whole queries and keys."""

from rlhf_mcore.families.base import KV, POST_NORM_DECODER, QUERIES, Family, qk_norm

FAMILY = Family(
    "olmo2",
    "Olmo2",
    POST_NORM_DECODER + qk_norm(QUERIES, KV),
    megatron={"qk_layernorm": True},
    repeats_heads=True,
    flags={"attention_bias": False},
    norms="outputs",
    norm_of_projections=True,
)
