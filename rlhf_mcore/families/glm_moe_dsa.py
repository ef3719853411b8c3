"""GLM-5 (Zhipu AI 2026): DeepSeek-V3.2's attention with another rotation of the indexer; since GLM-5.2, layers share keys."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.indexed import INDEXER, IndexedLatent
from rlhf_mcore.families.latent import LATENT_DECODER
from rlhf_mcore.families.mixture import SIGMOID_EXPERTS, ListedMixture

FAMILY = Family(
    "glm_moe_dsa",
    "GlmMoeDsa",
    LATENT_DECODER + INDEXER + SIGMOID_EXPERTS,
    latent=IndexedLatent(rotates_pairs=True, shares=True),
    mixture=ListedMixture(absent_dense=None),
    layer_type="indexed_attention",
    flags={"attention_bias": False, "mlp_bias": False, "norm_topk_prob": True, "rope_interleave": True},
    stated={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "indexer_rope_interleave": True},
)
