"""The tower of Gemma 3: transformers' SigLIP and its projection, with the arguments of the towers of Qwen's models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, PretrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from rlhf_mcore.data.images import whole_images
from rlhf_mcore.families.vision import VisionSizes


class SquareTower(torch.nn.Module):
    """Reads images of one size."""

    def __init__(self, config: PretrainedConfig, sizes: VisionSizes, hidden_size: int, dtype: torch.dtype):
        """Build from the tower's ``config``; ``hidden_size`` is the decoder's."""
        super().__init__()
        self._channels = sizes.channels
        self.vision_tower = torch.nn.Module()  # as files name it
        self.vision_tower.vision_model = AutoModel.from_config(config, dtype=dtype)
        whole: Any = SimpleNamespace(
            vision_config=config,
            text_config=SimpleNamespace(hidden_size=hidden_size),
            mm_tokens_per_image=sizes.positions // sizes.merge_size**2,
        )
        self.multi_modal_projector = Gemma3MultiModalProjector(whole).to(dtype)

    def forward(self, pixels: Tensor, *, grid_thw: Tensor, return_dict: bool) -> SimpleNamespace:
        """Return the features ``pooler_output`` [tokens, hidden] of images as patches, see ``data.images.whole_images``."""
        patches = pixels.size(0) // len(grid_thw)
        edge = int(patches**0.5)
        hidden = self._siglip(whole_images(pixels, (1, edge, edge), self._channels)).last_hidden_state
        return SimpleNamespace(pooler_output=self.multi_modal_projector(hidden).flatten(0, 1))

    @property
    def _siglip(self) -> Any:
        return self.vision_tower.vision_model

    @property
    def is_gradient_checkpointing(self) -> bool:
        return bool(self._siglip.is_gradient_checkpointing)

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        """Keep activations of one block at a time."""
        self._siglip.gradient_checkpointing_enable(options)
