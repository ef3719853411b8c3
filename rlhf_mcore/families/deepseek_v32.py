"""DeepSeek-V3.2 (DeepSeek-AI 2025): DeepSeek-V3 in which an indexer selects the keys of a token."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.latent import INDEXER, LATENT_DECODER, Latent
from rlhf_mcore.families.mixture import SIGMOID_EXPERTS, SigmoidMixture

FAMILY = Family(
    "deepseek_v32",
    "DeepseekV32",
    LATENT_DECODER + INDEXER + SIGMOID_EXPERTS,
    latent=Latent(is_indexed=True),
    mixture=SigmoidMixture(states_groups=True),
    flags={"attention_bias": False, "norm_topk_prob": True},
    stated={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
)
