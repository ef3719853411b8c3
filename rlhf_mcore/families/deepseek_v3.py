"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv 2412.19437), Moonlight and Kimi-K2: latent attention, sigmoid routing."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.latent import LATENT_DECODER, Latent
from rlhf_mcore.families.mixture import SIGMOID_EXPERTS, SigmoidMixture

FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3",
    LATENT_DECODER + SIGMOID_EXPERTS,
    latent=Latent(),
    mixture=SigmoidMixture(states_groups=True),
    flags={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
    # Without these keys in config.json, vLLM routes by a softmax and without the bias.
    stated={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
)
