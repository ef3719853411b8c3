"""Llama 2 and 3 (Touvron et al. 2023, arXiv 2307.09288; Grattafiori et al. 2024, arXiv 2407.21783)."""

from rlhf_mcore.families.base import DECODER, Family

FAMILY = Family("llama", "Llama", DECODER, repeats_heads=True, flags={"attention_bias": False, "mlp_bias": False})
