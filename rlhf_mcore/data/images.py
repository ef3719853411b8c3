"""The images of a run's prompts, as files named by digest. Each process reads the vision tower's inputs from them.

Rows contain image digests, never pixels. Loading the data decodes each image once per machine
(``rlhf_mcore.data.image_rows``), and writes its patches as uint8 next to its original bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.siglip import IMAGE_TOKEN, square_merge
from rlhf_mcore.readers.model_files import PROCESSOR_FILES, read_config, tokenizer_contents

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


LEVELS = "levels.npy"
_FORMAT = b"patches 1"  # file format version; a new version writes new files
_KEPT = 64  # images in the cache of a process


@dataclass(slots=True, eq=False)
class ProcessedImage:
    """An image as input of a vision tower.

    ``pixel_values`` [patches, channels * frames * patch * patch] fp32 is the output of the model's image processor.
    ``grid_thw`` contains the numbers of frames, patch rows and patch columns.
    """

    digest: str
    pixel_values: Tensor
    grid_thw: tuple[int, int, int]

    def num_tokens(self, merge_size: int) -> int:
        """Return the number of tokens of the image: one per ``merge_size`` squared patches of a frame."""
        frames, rows, columns = self.grid_thw
        return frames * rows * columns // merge_size**2


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """How a model represents an image: ``token_id``, once per square of ``merge_size`` by ``merge_size`` patches."""

    token_id: int
    merge_size: int

    @classmethod
    def of(cls, model_dir: str) -> ImageTokens:
        """Read config.json in the Hugging Face directory of a vision model.

        Raises:
            ConfigError: the file is missing or broken.
        """
        config = read_config(model_dir, model_dir)
        if IMAGE_TOKEN in config:
            return cls(config.integer(IMAGE_TOKEN), square_merge(config))
        merge_size = config.object("vision_config").integer("spatial_merge_size", minimum=1, default=1)
        return cls(config.integer("image_token_id"), merge_size)


class ImageStore:
    """Images in a directory: the original bytes, and in a subdirectory the patches from a model's image processor.

    Files are read on demand. Each file is written under a temporary name and then renamed, so that processes may write the same
    file concurrently.
    """

    def __init__(self, patches: Path) -> None:
        """Set the directory of patches."""
        self.patches = patches
        self.directory = patches.parent
        self._levels: np.ndarray | None = None
        self._kept: OrderedDict[str, ProcessedImage] = OrderedDict()

    @classmethod
    def of(cls, run: Path, model_dir: str, image_pixels: list[int] | None) -> ImageStore:
        """Return the store of a run: ``images`` in its directory, with a subdirectory per processor and ``data.image_pixels``."""
        digest = blake2b(_FORMAT + repr(image_pixels).encode(), digest_size=6)
        for name in PROCESSOR_FILES:
            file = Path(model_dir, name)
            digest.update(file.read_bytes() if file.is_file() else b"-")
        return cls(run / "images" / digest.hexdigest())

    def features(self, digest: str) -> ProcessedImage:
        """Return the tower's input for an image. A process caches the most recent images.

        Raises:
            OSError: the store does not contain the image, because the data was loaded elsewhere.
        """
        if (kept := self._kept.get(digest)) is not None:
            self._kept.move_to_end(digest)
            return kept
        image = self._read(digest)
        self._kept[digest] = image
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return image

    def _read(self, digest: str) -> ProcessedImage:
        import torch

        if self._levels is None:
            self._levels = np.load(self.patches / LEVELS)  # [channels, 256] fp32
        file = self.patches / f"{digest}.npy"
        try:
            patches = np.load(file)  # [rows, columns, channels * frames * patch * patch] uint8
        except ValueError as error:
            raise ConfigError(
                f"{file} is damaged ({error}); remove its folder; the same command writes it again"
            ) from error
        rows, columns, size = patches.shape
        channels = len(self._levels)
        by_channel = patches.reshape(rows * columns, channels, size // channels)
        values = np.stack([self._levels[channel][by_channel[:, channel]] for channel in range(channels)], axis=1)
        return ProcessedImage(digest, torch.from_numpy(values.reshape(rows * columns, size)), (1, rows, columns))

    def content(self, digest: str) -> bytes:
        """Return the original bytes of an image.

        Raises:
            OSError: the store does not contain the image.
        """
        return (self.directory / digest).read_bytes()


def whole_images(pixels: Tensor, grid: Sequence[int], channels: int) -> Tensor:
    """Assemble images from patches: [images * patches, channels * patch^2] -> [images, channels, height, width].

    All images have the same ``grid``.
    """
    _, rows, columns = grid
    edge = isqrt(pixels.size(1) // channels)
    apart = pixels.reshape(-1, rows, columns, channels, edge, edge)
    return apart.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, rows * edge, columns * edge)


def placeholders(token_ids: Sequence[int], token_id: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the token range of each image: (first, number). Further tokens with this id are text from the policy.

    Raises:
        ValueError: there are fewer such tokens than ``counts``, or the tokens of an image are not contiguous.
    """
    places = np.flatnonzero(np.asarray(token_ids) == token_id)
    found: list[tuple[int, int]] = []
    taken = 0
    for count in counts:
        own = places[taken : taken + count]
        if len(own) < count or own[-1] - own[0] != count - 1:
            raise ValueError(
                f"image {len(found) + 1} has {count} tokens, but the prompt has no {count} contiguous image tokens there"
            )
        found.append((int(own[0]), count))
        taken += count
    return found


class SquareProcessor:
    """Makes a transformers image processor that returns whole images return patches. Other attributes are passed on."""

    def __init__(self, inner: Any, model_dir: str):
        """Read how the model represents an image in text.

        Raises:
            ConfigError: the processor splits images, its size differs from the tower's input, or the tokenizer has no image
            tokens.
        """
        config = read_config(model_dir, model_dir)
        self._inner, self._patch = inner, config.object("vision_config").integer("patch_size", 1)
        edge = config.object("vision_config").integer("image_size", 1)
        self._rows = edge // self._patch
        where = f"model.path={model_dir}: preprocessor_config.json"
        if inner.do_pan_and_scan:
            raise ConfigError(f"{where}: do_pan_and_scan=true is not supported; set it to false")
        if (inner.size["height"], inner.size["width"]) != (edge, edge):
            raise ConfigError(f"{where}: size must equal vision_config.image_size={edge} of config.json; correct it")
        added = {token["id"]: token["content"] for token in tokenizer_contents(model_dir).get("added_tokens", ())}
        keys = ("boi_token_index", "image_token_index", "eoi_token_index")
        if not added.keys() >= {config.integer(key) for key in keys}:
            raise ConfigError(
                f"model.path={model_dir}: tokenizer.json lacks the tokens of {', '.join(keys)} in config.json; add them"
            )
        self._begin, self._token, self._end = (added[config.integer(key)] for key in keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def written(self, text: str) -> str:
        """Return a text in which each begin token of an image is replaced by the processor's text for an image."""
        return text.replace(self._begin, f"\n\n{self._begin}{self._token}{self._end}\n\n")

    def get_number_of_image_patches(self, height: int, width: int) -> int:
        """Return the number of patches of an image, which does not depend on its size."""
        return self._rows**2

    def __call__(self, images: Sequence[Image], **options: Any) -> dict[str, Any]:
        """Return the patches [patches, channels * patch^2] of one image, and its grid."""
        [whole] = self._inner(images=images, **options)["pixel_values"]
        rows, edge = self._rows, self._patch
        apart = whole.reshape(-1, rows, edge, rows, edge).transpose(1, 3, 0, 2, 4)
        return {"pixel_values": apart.reshape(rows * rows, -1), "image_grid_thw": [(1, rows, rows)]}
