"""Qwen3.5 (Qwen Team 2026) with its tower: Qwen3-VL's tower without features for decoder layers."""

from dataclasses import replace

from rlhf_mcore.families.qwen3_5_text import FAMILY as TEXT
from rlhf_mcore.families.vision import Vision, plain_tower, within

FAMILY = replace(
    TEXT,
    name="qwen3_5",
    rules=within(TEXT.rules, "model.language_model."),
    vision=Vision(
        plain_tower,
        "model.visual.",
        interleaved=True,
        head_dim=TEXT.head_dim,
        rotates=0.25,
        sections=(11, 11, 10),
        stated=("num_position_embeddings",),
    ),
)
