"""gpt-oss (OpenAI 2025, arXiv 2508.10925): sinks, windows in every other layer, biases, experts with clamped SwiGLU."""

from rlhf_mcore.families.base import DECODER, OUTPUT_BIAS, QKV_BIAS, SINKS, Family
from rlhf_mcore.families.mixture import Mixture, stacked_experts
from rlhf_mcore.families.windows import Windows

LIMIT = 7.0
FAMILY = Family(
    "gpt_oss",
    "GptOss",
    DECODER + QKV_BIAS + OUTPUT_BIAS + SINKS + stacked_experts(),
    megatron={
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": LIMIT,
    },
    head_dim=64,
    mixture=Mixture("intermediate_size", top_k=4, always_renormalises=True),
    flags={"attention_bias": True},
    numbers={"swiglu_alpha": 1.702, "swiglu_limit": LIMIT, "rms_norm_eps": 1e-5},  # vLLM supports only these values
    windows=Windows(every=2, is_fixed=True),
)
