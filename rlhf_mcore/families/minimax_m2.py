"""MiniMax-M2, M2.1, M2.5 and M2.7 (MiniMax 2025): norms of whole queries and keys, half of each head rotates, sigmoid routing."""

from rlhf_mcore.families.base import DECODER, KV, QUERIES, Family, qk_norm
from rlhf_mcore.families.mixture import BiasedMixture, expert_bias, experts

FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2",
    DECODER
    + qk_norm(QUERIES, KV)
    + experts("block_sparse_moe", ("w1", "w3", "w2"))
    + expert_bias("block_sparse_moe", in_memory="mlp.e_score_correction_bias"),
    megatron={"qk_layernorm": True},
    head_dim=128,
    norm_of_projections=True,
    rotates_partly=True,
    mixture=BiasedMixture("intermediate_size", top_k=8),
    flags={"attention_bias": False, "use_qk_norm": True},
    numbers={"shared_intermediate_size": 0, "router_jitter_noise": 0.0},
    stated={"scoring_func": "sigmoid", "use_routing_bias": True},  # vLLM reads these, transformers does not
)
