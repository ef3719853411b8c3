"""DeepSeek-V3.2 (DeepSeek-AI 2025): DeepSeek-V3 in which an indexer selects the keys of a token."""

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.indexed import INDEXER, IndexedLatent
from rlhf_mcore.families.latent import LATENT_DECODER
from rlhf_mcore.families.mixture import SIGMOID_EXPERTS, SigmoidMixture

FAMILY = Family(
    "deepseek_v32",
    "DeepseekV32",
    LATENT_DECODER + INDEXER + SIGMOID_EXPERTS,
    latent=IndexedLatent(),
    mixture=SigmoidMixture(states_groups=True),
    layer_type="indexed_attention",
    flags={"attention_bias": False, "norm_topk_prob": True, "indexer_rope_interleave": False},
    stated={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    numbers={"index_topk_freq": 1},
    absent=("index_topk_pattern", "indexer_types"),
)
