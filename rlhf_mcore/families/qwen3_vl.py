"""Qwen3-VL (Qwen Team 2025, arXiv 2511.21631): Qwen3 with a tower.

Three tower layers add features to decoder layers (DeepStack).
"""

from dataclasses import replace

from rlhf_mcore.families.qwen3 import FAMILY as TEXT
from rlhf_mcore.families.vision import Vision, plain_tower, within

FAMILY = replace(
    TEXT,
    name="qwen3_vl",
    architecture="Qwen3VL",
    rules=within(TEXT.rules, "model.language_model."),
    vision=Vision(
        plain_tower,
        "model.visual.",
        interleaved=True,
        head_dim=TEXT.head_dim,
        stated=("num_position_embeddings", "deepstack_visual_indexes"),
    ),
)
