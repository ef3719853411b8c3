"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786) with its tower. All tokens of an image attend to each other."""

from dataclasses import replace

from rlhf_mcore.families.gemma3_text import FAMILY as TEXT
from rlhf_mcore.families.siglip import SquareVision, square_tower
from rlhf_mcore.families.vision import within

FAMILY = replace(
    TEXT,
    name="gemma3",
    rules=within(TEXT.rules, "language_model.model."),
    vision=SquareVision(
        square_tower,
        "",
        merger="multi_modal_projector",
        attends_within=True,
        defaults={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
)
