"""EXAONE 4.0 (LG AI Research 2025, arXiv 2507.11407): norms of outputs and heads, and hybrid attention."""

from rlhf_mcore.families.base import POST_NORM_DECODER, QK_NORM, Family
from rlhf_mcore.families.windows import Windows

FAMILY = Family(
    "exaone4",
    "Exaone4",
    POST_NORM_DECODER + QK_NORM,
    megatron={"qk_layernorm": True},
    flags={"attention_bias": False, "bias": False, "mlp_bias": False},  # vLLM reads these, transformers does not
    norms="outputs",
    windows=Windows(every=4, rotates_all=False),
)
