"""GLM-4.5, GLM-4.5-Air and GLM-4.6 (Zhipu AI 2025, arXiv 2508.06471): half of each head rotates; DeepSeek-V3's routing."""

from rlhf_mcore.families.base import DECODER, NORMED_HEAD_DIM, OPTIONAL_QKV_BIAS, Family, qk_norm
from rlhf_mcore.families.mixture import SIGMOID_EXPERTS, SigmoidMixture

FAMILY = Family(
    "glm4_moe",
    "Glm4Moe",
    DECODER + OPTIONAL_QKV_BIAS + qk_norm(NORMED_HEAD_DIM) + SIGMOID_EXPERTS,
    mixture=SigmoidMixture(),
    flags={"norm_topk_prob": True},
    qk_norm_key="use_qk_norm",
    qkv_bias_key="attention_bias",
    rotates_partly=True,
)
