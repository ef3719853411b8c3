"""Qwen3-VL with MoE layers (Qwen Team 2025, arXiv 2511.21631). Files stack a layer's experts in one tensor."""

from dataclasses import replace

from rlhf_mcore.families.base import DECODER, QK_NORM
from rlhf_mcore.families.mixture import Mixture, stacked_experts
from rlhf_mcore.families.qwen3_moe import FAMILY as TEXT
from rlhf_mcore.families.vision import Vision, plain_tower, within

FAMILY = replace(
    TEXT,
    name="qwen3_vl_moe",
    architecture="Qwen3VLMoe",
    rules=within(DECODER + QK_NORM + stacked_experts("mlp.gate", biased=False), "model.language_model."),
    mixture=Mixture("moe_intermediate_size", top_k=4, has_dense_layers=True, always_renormalises=True),
    vision=Vision(
        plain_tower,
        "model.visual.",
        interleaved=True,
        stated=("num_position_embeddings", "deepstack_visual_indexes"),
    ),
)
