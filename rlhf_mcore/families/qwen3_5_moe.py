"""Qwen3.5 with experts and its tower (Qwen Team 2026): the tower of the dense models."""

from dataclasses import replace

from rlhf_mcore.families.qwen3_5 import FAMILY as DENSE
from rlhf_mcore.families.qwen3_5_moe_text import FAMILY as TEXT
from rlhf_mcore.families.vision import within

FAMILY = replace(
    TEXT,
    name="qwen3_5_moe",
    rules=within(TEXT.rules, "model.language_model."),
    vision=DENSE.vision,
)
