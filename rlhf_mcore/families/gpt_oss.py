"""gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks, windows in every other layer, biases everywhere, a clamped SwiGLU in all experts."""

from typing import Any

from rlhf_mcore.families.base import DECODER, OUTPUT_BIAS, QKV_BIAS, SINKS, Family, Windows, stacked_experts
from rlhf_mcore.families.mixture import Mixture
from rlhf_mcore.foreign import Fields


def _settings(hf_config: Fields) -> dict[str, Any]:
    return {"activation_func_clamp_value": hf_config.number("swiglu_limit", 1e-6, 1e6, default=7.0)}


FAMILY = Family(
    "gpt_oss",
    "GptOss",
    DECODER + QKV_BIAS + OUTPUT_BIAS + SINKS + stacked_experts(),
    megatron={"add_bias_linear": True, "add_qkv_bias": True, "softmax_type": "learnable", "glu_linear_offset": 1.0},
    head_dim=64,
    mixture=Mixture("intermediate_size", top_k=4, always_renormalises=True),
    flags={"attention_bias": True},
    numbers={"swiglu_alpha": 1.702},
    settings=_settings,
    windows=Windows(every=2),
    dequantised=("mxfp4",),
)
