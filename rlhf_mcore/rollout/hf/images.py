"""Images of a batch for transformers: pixels for the first pass, and positions, for some models in 3D, for all passes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_mcore.data.images import ImageStore, ImageTokens, placeholders, whole_images

if TYPE_CHECKING:
    from rlhf_mcore.rollout.hf.engine import _Batch


class BatchImages:
    """The images of a batch of left-padded requests."""

    def __init__(self, model: Any, batch: _Batch, images: tuple[str, str]) -> None:
        """Read the images. ``images`` contains the directories of their store and of the model.

        Raises:
            OSError: the store does not contain an image.
            ValueError: a prompt lacks the tokens of its images.
        """
        folder, model_dir = images
        store, tokens, device = ImageStore(Path(folder)), ImageTokens.of(model_dir), batch.token_ids.device
        kinds = torch.zeros_like(batch.token_ids)  # 1 for image tokens
        all_images = []
        for row, request in enumerate(batch.requests):
            own = [store.features(digest) for digest in request.images]
            counts = [image.num_tokens(tokens.merge_size) for image in own]
            padding = batch.token_ids.size(1) - len(request.prompt_ids)
            for first, number in placeholders(request.prompt_ids, tokens.token_id, counts):
                kinds[row, padding + first : padding + first + number] = 1
            all_images += own
        self._kinds, pixels = kinds, torch.cat([image.pixel_values for image in all_images]).to(device, model.dtype)
        self._rotates = hasattr(model.model, "get_rope_index")
        if not self._rotates:
            tower = model.config.vision_config
            self._pixels = {"pixel_values": whole_images(pixels, all_images[0].grid_thw, tower.num_channels)}
            return
        grids = torch.tensor([image.grid_thw for image in all_images], device=device)
        self._pixels = {"pixel_values": pixels, "image_grid_thw": grids}
        # [3, b, T], and the offset [b, 1] between the position of a later token and the number of tokens before it.
        self._prompts, self._shift = model.model.get_rope_index(
            batch.token_ids, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=batch.mask
        )

    def pixels(self, num_tokens: int) -> dict[str, Tensor]:
        """Return the image arguments of a pass over the prompts and their sampled tokens, ``num_tokens`` per row."""
        kinds = F.pad(self._kinds, (0, num_tokens - self._kinds.size(1)))
        return {**self._pixels, "mm_token_type_ids" if self._rotates else "token_type_ids": kinds}

    def positions(self, places: Tensor) -> Tensor:
        """Return the positions [3, b, T], or [b, T], of tokens from their indices [b, T] within their rows."""
        if not self._rotates:
            return places
        later = (places[:, self._prompts.size(2) :] + self._shift).expand(3, -1, -1)
        return torch.cat([self._prompts, later], dim=-1)
