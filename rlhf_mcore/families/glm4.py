"""GLM-4-0414 and GLM-Z1 (Zhipu AI 2025): norms around blocks, gate and up matrices joined, half of each head rotates."""

from dataclasses import replace

from rlhf_mcore.families.base import DECODER, HF_LAYER, HIDDEN, OPTIONAL_QKV_BIAS, OUTPUT_NORMS, Family
from rlhf_mcore.families.joined import join_mlp

_OUTPUT_NORMS = tuple(
    replace(rule, tensors={f"{HF_LAYER}{name}_layernorm.weight": (HIDDEN,)})
    for rule, name in zip(OUTPUT_NORMS, ("post_self_attn", "post_mlp"), strict=True)
)
FAMILY = Family(
    "glm4",
    "Glm4",
    join_mlp(DECODER) + OPTIONAL_QKV_BIAS + _OUTPUT_NORMS,
    megatron={"rotary_interleaved": True},
    head_dim=128,
    norms="both",
    qkv_bias_key="attention_bias",
    qkv_bias=True,
    rotates_partly=True,
)
