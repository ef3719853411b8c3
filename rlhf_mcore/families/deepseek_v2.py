"""DeepSeek-V2, V2-Lite and Coder-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, softmax routing."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.latent import LATENT_DECODER, Latent
from rlhf_mcore.families.mixture import SoftmaxMixture, experts, shared_expert

FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2",
    LATENT_DECODER + experts("mlp") + shared_expert("mlp.shared_experts"),
    latent=Latent(),
    mixture=SoftmaxMixture(),
    flags={"attention_bias": False, "mlp_bias": False, "norm_topk_prob": False},
)
