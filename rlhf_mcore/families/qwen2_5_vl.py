"""Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923): Qwen2.5 with a tower whose attention is windowed in most layers."""

from dataclasses import replace

from rlhf_mcore.families.qwen2 import FAMILY as TEXT
from rlhf_mcore.families.vision import Vision, gated_tower

FAMILY = replace(
    TEXT,
    name="qwen2_5_vl",
    architecture="Qwen2_5_VL",
    vision=Vision(gated_tower, "visual.", interleaved=False, ties_inside=True),
)
