"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): experts in all layers, and norms of whole queries and keys."""

from rlhf_mcore.families.base import DECODER, KV, QUERIES, Family, qk_norm
from rlhf_mcore.families.mixture import Mixture, experts

FAMILY = Family(
    "olmoe",
    "Olmoe",
    DECODER + qk_norm(QUERIES, KV) + experts("mlp"),
    megatron={"qk_layernorm": True},
    repeats_heads=True,
    norm_of_projections=True,
    mixture=Mixture("intermediate_size", top_k=8),
    flags={"attention_bias": False, "norm_topk_prob": False},
    numbers={"rms_norm_eps": 1e-5},  # vLLM reads neither of these keys
    absent=("clip_qkv",),
)
