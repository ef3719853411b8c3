"""Images of models that scale each to one square (Gemma 3), cut into patches as those of other models are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.model_files import read_config, tokenizer_contents

if TYPE_CHECKING:
    from PIL.Image import Image


class SquareProcessor:
    """A processor of transformers that returns whole images, as one that returns patches. What is not here is that processor's."""

    def __init__(self, inner: Any, model_dir: str):
        """Read how the model writes an image in texts.

        Raises:
            ConfigError: the processor cuts images into several, makes them as large as the tower does not read them, or the
                tokenizer has no tokens for images.
        """
        config = read_config(model_dir, model_dir)
        self._inner, self._patch = inner, config.object("vision_config").integer("patch_size", 1)
        edge = config.object("vision_config").integer("image_size", 1)
        self._rows = edge // self._patch
        where = f"model.path={model_dir}: preprocessor_config.json"
        if inner.do_pan_and_scan:
            raise ConfigError(f"{where} has do_pan_and_scan, which is not supported; set it to false")
        if (inner.size["height"], inner.size["width"]) != (edge, edge):
            raise ConfigError(f"{where}: size is not the vision_config.image_size={edge} of config.json; correct it")
        added = {token["id"]: token["content"] for token in tokenizer_contents(model_dir).get("added_tokens", ())}
        keys = ("boi_token_index", "image_token_index", "eoi_token_index")
        if not added.keys() >= {config.integer(key) for key in keys}:
            raise ConfigError(
                f"model.path={model_dir}: tokenizer.json has no tokens with the numbers {', '.join(keys)}"
            )
        self._begin, self._token, self._end = (added[config.integer(key)] for key in keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def written(self, text: str) -> str:
        """Return a text with what the model's processor writes for an image in the place of the token that begins one."""
        return text.replace(self._begin, f"\n\n{self._begin}{self._token}{self._end}\n\n")

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        """Count the patches of an image of any size."""
        return self._rows**2

    def __call__(self, images: Sequence[Image], **options: Any) -> dict[str, Any]:
        """Return the patches of one image [patches, channels * patch^2], and its grid."""
        [whole] = self._inner(images=images, **options)["pixel_values"]
        rows, edge = self._rows, self._patch
        apart = whole.reshape(-1, rows, edge, rows, edge).transpose(1, 3, 0, 2, 4)
        return {"pixel_values": apart.reshape(rows * rows, -1), "image_grid_thw": [(1, rows, rows)]}
