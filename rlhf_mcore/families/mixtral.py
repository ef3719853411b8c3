"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with experts in every layer."""

from rlhf_mcore.families.base import DECODER, Family
from rlhf_mcore.families.mixture import Mixture, experts

FAMILY = Family(
    "mixtral",
    "Mixtral",
    DECODER + experts("block_sparse_moe", ("w1", "w3", "w2")),
    mixture=Mixture("intermediate_size", top_k=2, always_renormalises=True),
    window_switch="sliding_window",
)
