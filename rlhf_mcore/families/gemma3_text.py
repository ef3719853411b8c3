"""Text models of Gemma 3 (Gemma Team 2025, arXiv 2503.19786): norms around blocks; window layers have their own rotation."""

from typing import Any

from rlhf_mcore.families.base import QK_NORM, SANDWICH_DECODER, Family
from rlhf_mcore.families.windows import Windows
from rlhf_mcore.foreign import Fields


def _settings(hf_config: Fields) -> dict[str, Any]:
    return {"softmax_scale": hf_config.number("query_pre_attn_scalar", 1e-6, 1e6, default=256.0) ** -0.5}


FAMILY = Family(
    "gemma3_text",
    "Gemma3",
    SANDWICH_DECODER + QK_NORM,
    megatron={"qk_layernorm": True, "layernorm_zero_centered_gamma": True},  # a norm multiplies by one plus its weight
    head_dim=256,
    flags={"attention_bias": False, "use_bidirectional_attention": False},
    norms="both",
    activation="gelu_pytorch_tanh",
    tied=True,
    scales_embeddings=True,
    absent=("attn_logit_softcapping", "final_logit_softcapping"),
    settings=_settings,
    windows=Windows(every=6),
)
