"""GLM-4.7-Flash (Zhipu AI 2026): latent attention and routing as in DeepSeek-V3."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.latent import LATENT_DECODER, Latent
from rlhf_mcore.families.mixture import SIGMOID_EXPERTS, ListedMixture

FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLite",
    LATENT_DECODER + SIGMOID_EXPERTS,
    latent=Latent(),
    mixture=ListedMixture(),
    flags={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
)
