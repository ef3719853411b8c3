"""GLM-4.5, GLM-4.5-Air and GLM-4.6 (Zhipu AI 2025, arXiv 2508.06471): half of a head rotated, DeepSeek-V3's routing."""

from rlhf_mcore.families.base import DECODER, NORMED_HEAD_DIM, QKV_BIAS, SIGMOID_EXPERTS, Family, qk_norm
from rlhf_mcore.families.mixture import SigmoidMixture

FAMILY = Family(
    "glm4_moe",
    "Glm4Moe",
    DECODER + QKV_BIAS + qk_norm(NORMED_HEAD_DIM) + SIGMOID_EXPERTS,
    megatron={"add_qkv_bias": True},
    mixture=SigmoidMixture(),
    flags={"attention_bias": True, "norm_topk_prob": True},
    qk_norm_key="use_qk_norm",
)
