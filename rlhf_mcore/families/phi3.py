"""Phi-4 (Microsoft 2024, arXiv 2412.08905) and other models of this architecture without windows: Llama with joined matrices."""

from rlhf_mcore.families.base import DECODER, Family
from rlhf_mcore.families.joined import join_mlp, join_qkv

FAMILY = Family(
    "phi3",
    "Phi3",
    join_mlp(join_qkv(DECODER)),
    repeats_heads=True,
    rotates_partly=True,
    window_switch="sliding_window",
)
