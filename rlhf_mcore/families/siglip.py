"""Describe SigLIP's tower (Zhai et al. 2023, arXiv 2303.15343) and Gemma 3's projection. Every image becomes a square."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from rlhf_mcore.families.sizes import size
from rlhf_mcore.families.vision import MAX_DEPTH, MAX_EDGE, MAX_WIDTH, Tensors, Vision, linear, norm
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import VisionSizes

IMAGE_TOKEN = "image_token_index"  # config.json's key for models with such a tower


def square_merge(hf_config: Fields) -> int:
    """Return the edge, in patches, of the square that becomes one token."""
    tower = hf_config.object("vision_config")
    rows = tower.integer("image_size", 1, 2**14) // tower.integer("patch_size", 1, MAX_EDGE)
    return max(1, rows // isqrt(_num_tokens(hf_config)))


def _num_tokens(hf_config: Fields) -> int:
    return hf_config.integer("mm_tokens_per_image", 1, 2**16, default=256)


@dataclass(frozen=True, slots=True)
class SquareVision(Vision):
    """A tower that reads squares of ``image_size`` pixels and returns ``mm_tokens_per_image`` features per square.

    ``defaults``: sizes of the language model that config.json may omit.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def text(self, hf_config: Fields) -> Fields:
        """Return the section of a config.json that describes the language model."""
        own = hf_config.object("text_config")
        return Fields({**self.defaults, **own.content}, own.where, own.remedy)

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry."""
        tower = hf_config.object("vision_config")
        rows = tower.integer("image_size", 1, 2**14) // tower.integer("patch_size", 1, MAX_EDGE)
        return {
            "vision": VisionSizes(
                image_token_id=hf_config.integer(IMAGE_TOKEN, 0, size(self.text(hf_config), "vocab_size") - 1),
                hidden_size=tower.integer("hidden_size", 1, MAX_WIDTH),
                ffn_size=tower.integer("intermediate_size", 1, MAX_WIDTH),
                depth=tower.integer("num_hidden_layers", 1, MAX_DEPTH),
                patch_size=tower.integer("patch_size", 1, MAX_EDGE),
                temporal_patch_size=1,
                channels=tower.integer("num_channels", 1, MAX_EDGE, default=3),
                merge_size=square_merge(hf_config),
                sections=(),
                positions=rows**2,
            )
        }

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        sizes, tower = self.sizes(hf_config)["vision"], hf_config.object("vision_config")
        tokens = _num_tokens(hf_config)
        if sizes.patch_size * isqrt(sizes.positions) != tower.integer("image_size"):
            yield f"vision_config.image_size is not a multiple of patch_size={sizes.patch_size}; export the model again"
        elif sizes.positions != tokens * sizes.merge_size**2:
            yield f"the {sizes.positions} patches of an image do not form mm_tokens_per_image={tokens} squares; export the model again"
        if not hf_config.flag("tie_word_embeddings", default=True):
            yield "tie_word_embeddings=false is not supported with a tower; use another model"
        if tower.flag("vision_use_head", default=True):
            yield "vision_config.vision_use_head is not supported, only false; use another model"


def square_tower(v: VisionSizes, hidden_size: int) -> Tensors:
    """List the tensors of SigLIP's tower and of Gemma 3's projection."""
    tower, width = "vision_tower.vision_model.", v.hidden_size
    patch = f"{tower}embeddings.patch_embedding."
    tensors: Tensors = {
        f"{patch}weight": (width, v.channels, v.patch_size, v.patch_size),
        f"{patch}bias": (width,),
        f"{tower}embeddings.position_embedding.weight": (v.positions, width),
    }
    for layer in range(v.depth):
        block = f"{tower}encoder.layers.{layer}."
        tensors |= norm(block + "layer_norm1", width) | norm(block + "layer_norm2", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            tensors |= linear(f"{block}self_attn.{name}", width, width)
        tensors |= linear(block + "mlp.fc1", v.ffn_size, width) | linear(block + "mlp.fc2", width, v.ffn_size)
    projector = "multi_modal_projector.mm_"
    tensors |= {
        f"{projector}input_projection_weight": (width, hidden_size),
        f"{projector}soft_emb_norm.weight": (width,),
    }
    return tensors | norm(tower + "post_layernorm", width)
