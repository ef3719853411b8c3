"""Reads images from data rows: checks them before decoding, and writes them to the run's ``ImageStore``.

A row contains its images in a column (bytes, paths, or objects with both, as in Hugging Face's and verl's data sets). The
prompt then contains ``<image>`` for each image. Or the messages contain the images, as in OpenAI's API.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.images import LEVELS, ImageStore, ImageTokens, SquareProcessor
from rlhf_mcore.foreign import read_bytes
from rlhf_mcore.platform.cpu_libraries import declare_image_operators

if TYPE_CHECKING:
    from PIL.Image import Image

    from rlhf_mcore.config.schema import DataConfig

T = TypeVar("T")

MARK = "<image>"  # marks an image in a text
OWN_TASKS = "verifiers"  # an environment that ignores prompts
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.ASCII)
_SHOWN = 200  # characters of a path in messages; a longer string is unlikely to be a path
_TEXT_PARTS, _IMAGE_PARTS = ("text", "input_text"), ("image", "image_url", "input_image")


@dataclass(frozen=True, slots=True)
class RowImages:
    """A prompt with images. ``content`` is the input of the chat template, and ``messages`` the same with marks in texts."""

    content: str | list[dict[str, Any]]
    messages: str | list[dict[str, Any]]
    sources: list[Any]


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message. ``source`` is None for a mark."""

    source: Any = None


def parts_of(content: Any, place: str, *, marks: bool = False) -> list[str | ImagePart]:
    """Return the texts and images of a message's content, in order. With ``marks``, a mark in a text is an image.

    Raises:
        ConfigError: a part has an unknown type.
    """
    found: list[str | ImagePart] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS:
            found.append(ImagePart(_source_in(part)))
            continue
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS else part
        if not isinstance(text, str):
            kinds = ", ".join(_TEXT_PARTS + _IMAGE_PARTS)
            raise ConfigError(
                f"{place}: message content must be a text, or parts with the types {kinds}; found {part!r:.80}"
            )
        first, *others = text.split(MARK) if marks else [text]
        found.append(first)
        for piece in others:
            found += [ImagePart(), piece]
    return found


def take_images(content: Any, column: Any, place: str) -> RowImages:
    """Return the images of a prompt in the order of their marks.

    Args:
        content: value of the prompt column, not validated yet.
        column: value of the image column. None or empty: the prompt has only the images in its messages.

    Raises:
        ConfigError: the numbers of images and marks differ, or a message part has an unknown type.
    """
    given = _to_list(column, place)
    if not isinstance(content, list) and (not isinstance(content, str) or MARK not in content):
        return RowImages(content, content, given)  # the text is already rendered with the model's own image tokens
    turns = content if isinstance(content, list) else [{"role": "user", "content": content}]
    waiting, sources = iter(given), list[Any]()
    asked, written = [], []
    for message in turns:
        if not isinstance(message, Mapping):
            raise ConfigError(f"{place}: a message must be an object with role and content, found {message!r:.60}")
        parts = parts_of(message.get("content"), place, marks=True)
        images = [part for part in parts if isinstance(part, ImagePart)]
        sources += [next(waiting, None) if image.source is None else image.source for image in images]
        text = "".join(part if isinstance(part, str) else MARK for part in parts)
        for_template = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts if part
        ]
        written.append({**message, "content": text})
        asked.append({**message, "content": for_template if images else text})
    if (unused := len(list(waiting))) or None in sources:
        there = sum(source is not None for source in sources) + unused
        remedy = f"write {MARK} once for each image"
        if not there:
            remedy = "name their column in data.image_key, or give the row its images"
        raise ConfigError(f"{place}: {len(sources)} x {MARK} in the prompt, but images: {there}; {remedy}")
    return RowImages(asked, written if isinstance(content, list) else content, sources)


def _to_list(column: Any, place: str) -> list[Any]:
    if column is None:
        return []
    if isinstance(column, (list, tuple)):
        return list(column)
    if isinstance(column, (str, bytes, Mapping)):
        return [column]
    raise ConfigError(f"{place}: the image column contains {type(column).__name__} {column!r:.60}, not images")


def _source_in(part: Mapping[str, Any]) -> Any:
    for key in ("image", "image_url", "bytes", "path", "url"):
        value = part.get(key)
        if isinstance(value, Mapping):
            value = value if key == "image" else value.get("url")
        if value is not None:
            return value
    return None


def images_of_row(
    row: Mapping[str, Any], content: Any, key: str | None, images: ImageReader | None, folder: Path, place: str
) -> tuple[Any, Any, tuple[str, ...]]:
    """Return a prompt as texts, the same prompt for rendering, and the digests of its images.

    Args:
        key: name of the image column.
        images: reader of the run; None: the model takes no images.
        folder: folder of the data file.

    Raises:
        ConfigError: the model takes no images; or see ``take_images`` and ``ImageReader.take``.
    """
    column, reads_marks = row.get(key or ""), images is not None and key is not None
    messages = content if isinstance(content, list) else [{"content": content}]
    said = [message.get("content") for message in messages if isinstance(message, Mapping)]
    if not column and not any(isinstance(t, list) or (reads_marks and isinstance(t, str) and MARK in t) for t in said):
        return content, content, ()
    taken = take_images(content, column, place)
    if images is not None:
        return taken.messages, taken.content, images.take(taken.sources, folder, place)
    if taken.sources:
        raise ConfigError(
            f"{place}: the prompt has images, but the model takes none; use a vision model, or set data.image_key=null to ignore "
            "the image column"
        )
    return taken.messages, taken.content, ()


class ImageReader:
    """Reads, checks and processes the images of rows into a store. On each machine, one rank decodes each image."""

    def __init__(
        self,
        store: ImageStore,
        model_dir: str,
        data: DataConfig,
        deal: tuple[int, int] | None = None,
        *,
        asks: bool = False,
    ) -> None:
        """Load the image processor of a vision model.

        Args:
            deal: this rank's number on its machine and the number of ranks there; None: read torchrun's variables.
            asks: the environment uses its own tasks, so images of prompts would be ignored.

        Raises:
            ConfigError: transformers has no image processor for the model.
        """
        self.tokens = ImageTokens.of(model_dir)
        self._store, self._data, self._asks = store, data, asks
        self._rank, self._size = deal or (
            int(os.environ.get("LOCAL_RANK", 0)),
            int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        )
        self._processor = _load_processor(model_dir)
        if data.image_pixels is not None and isinstance(self._processor, SquareProcessor):
            raise ConfigError(
                f"data.image_pixels={data.image_pixels}: model.path={model_dir} scales all images to one size; set it to null"
            )
        if data.image_pixels is not None:
            least, most = data.image_pixels
            self._processor.size = {"shortest_edge": least, "longest_edge": most}
        self._counts: dict[str, int] = {}  # tokens of each image

    def take(self, sources: Sequence[Any], folder: Path, place: str, *, seen: int = 0) -> tuple[str, ...]:
        """Read the images of a prompt and return their digests.

        Paths are relative to ``folder``. ``seen`` is the number of earlier images of the prompt.

        Raises:
            ConfigError: there are too many images, or an image is missing, too large, damaged or in an unknown format.
        """
        if sources and self._asks:
            raise ConfigError(
                f"{place}: the prompt has images, but environment.function={OWN_TASKS} uses its own tasks; set another "
                "function, or data.image_key=null"
            )
        if (count := seen + len(sources)) > self._data.max_images:
            raise ConfigError(
                f"{place}: {count} images, more than data.max_images={self._data.max_images}; raise it, or shorten the row"
            )
        return tuple(
            self._add(source, folder, f"{place}, image {number}") for number, source in enumerate(sources, start=1)
        )

    @property
    def writes_around(self) -> bool:
        """Return whether the model's processor writes text around the image tokens."""
        return isinstance(self._processor, SquareProcessor)

    def written(self, text: str) -> str:
        """Return a rendered prompt with the processor's text around each image, and one token per image."""
        return self._processor.written(text) if self.writes_around else text

    def expand(self, token_ids: Sequence[int], images: Sequence[str], place: str) -> list[int]:
        """Return a prompt's tokens, with the single token of each image repeated to the image's token count.

        Raises:
            ConfigError: the numbers of image tokens and images differ.
        """
        found, counts = [], iter(images)
        num_places = sum(token == self.tokens.token_id for token in token_ids)
        if num_places != len(images):
            raise ConfigError(
                f"{place}: prompt and chat template contain {num_places} image tokens for {len(images)} images; write "
                f"{MARK} once for each image, and not the token itself; the chat template must write one "
                "for each image"
            )
        for token in token_ids:
            found += [token] * (self._count(next(counts)) if token == self.tokens.token_id else 1)
        return found

    def _count(self, digest: str) -> int:
        """Return the token count of an image. Another reader may have written the image to the store."""
        if digest not in self._counts:
            self._counts[digest] = self._store.features(digest).num_tokens(self.tokens.merge_size)
        return self._counts[digest]

    def files(self, images: Sequence[str]) -> list[str]:
        """Return the paths of the original image files."""
        return [str((self._store.directory / digest).resolve()) for digest in images]

    def _add(self, source: Any, folder: Path, place: str) -> str:
        content = self._content(source, folder, place)
        digest = blake2b(content, digest_size=16).hexdigest()
        if digest not in self._counts:
            image = self._open(content, place)
            width, height = image.size
            patches = _read_or_refuse(lambda: self._processor.get_number_of_image_patches(height, width), place)
            self._counts[digest] = patches // self.tokens.merge_size**2
            if int(digest, 16) % self._size == self._rank:
                self._write(digest, content, image, place)
        return digest

    def _content(self, source: Any, folder: Path, place: str) -> bytes:
        """Return the bytes of an image, from bytes, a file or a data URL."""
        limit = self._data.max_row_bytes
        longer = f"{place}: more than data.max_row_bytes={limit} bytes; make it smaller, or raise data.max_row_bytes"
        if isinstance(source, Mapping):
            source = _source_in(source)
        if isinstance(source, str):
            if match := _DATA_URL.match(source):
                try:
                    source = base64.b64decode(source[match.end() :], validate=True)
                except (binascii.Error, ValueError) as error:
                    raise ConfigError(f"{place}: its data URL is not base64 ({error}); encode it again") from error
            elif source.startswith("data:"):
                raise ConfigError(
                    f"{place}: {source:.40} is not an image data URL; it must start like data:image/png;base64,"
                )
            elif "://" in source and not source.startswith("file://"):
                raise ConfigError(
                    f"{place}: {source:.80}: URLs are not downloaded; download the images, and write file paths into the data"
                )
            elif source:
                path = folder / source.removeprefix("file://")
                if os.path.isfile(path) and os.path.getsize(path) > limit:
                    raise ConfigError(longer)
                remedy = "correct the path; it is relative to the data file"
                if len(source) > _SHOWN:
                    remedy = "if it is base64, write data:image/png;base64, before it"
                return read_bytes(path, limit=limit, where=f"{place}: {path!s:.{_SHOWN}}", remedy=remedy)
        if not isinstance(source, bytes) or not source:
            raise ConfigError(
                f"{place}: an image must be bytes, a path or a data URL, found {type(source).__name__} {source!r:.40}"
            )
        if len(source) > limit:
            raise ConfigError(longer)
        return source

    def _open(self, content: bytes, place: str) -> Image:
        """Open an image and check its size from the header, before anything is decoded."""
        from PIL import Image

        bound, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # data.max_image_pixels applies instead, below
        try:
            image = _read_or_refuse(lambda: Image.open(io.BytesIO(content), formats=_FORMATS), place)
        finally:
            Image.MAX_IMAGE_PIXELS = bound
        width, height = image.size
        if width * height > self._data.max_image_pixels:
            raise ConfigError(
                f"{place}: {width} by {height} pixels, more than data.max_image_pixels={self._data.max_image_pixels}; make it "
                "smaller, or raise data.max_image_pixels"
            )
        return image

    def _write(self, digest: str, content: bytes, image: Image, place: str) -> None:
        file = self._store.patches / f"{digest}.npy"
        if file.exists() and (self._store.directory / digest).exists():
            return
        patches = _read_or_refuse(lambda: self._patches(upright_rgb(image)), place)
        self._store.patches.mkdir(parents=True, exist_ok=True)
        if not (self._store.patches / LEVELS).exists():
            _save(self._store.patches / LEVELS, _levels(self._processor))
        _save(file, patches)
        _write_whole(self._store.directory / digest, content)

    def _patches(self, image: Image) -> np.ndarray:
        """Return the patches [rows, columns, channels * frames * patch * patch] uint8 of a scaled, unnormalised image."""
        features = self._processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
        frames, rows, columns = map(int, features["image_grid_thw"][0])
        values = features["pixel_values"]
        assert frames == 1 and values.min() >= 0 and values.max() <= 255, features["image_grid_thw"]
        return values.reshape(rows, columns, -1).astype(np.uint8)


def _read_or_refuse(action: Callable[[], T], place: str) -> T:
    """Run an action on an untrusted file. Report any exception of a decoder as an error in the row."""
    try:
        return action()
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        reason = reason.replace(" file <_io.BytesIO", "").split(" object at")[0]
        raise ConfigError(
            f"{place}: it cannot be read ({reason}); replace it by an intact {', '.join(_FORMATS)} image"
        ) from error


def _load_processor(model_dir: str) -> Any:
    """Return the image processor of a model. It scales with Pillow, so torchvision does not change the results."""
    declare_image_operators()
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(
            model_dir, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise ConfigError(
            f"model.path={model_dir}: no image processor could be loaded ({reason}); add preprocessor_config.json"
        ) from error
    if type(processor).__name__ == "Gemma3ImageProcessorPil":
        return SquareProcessor(processor, model_dir)
    if not hasattr(processor, "get_number_of_image_patches"):
        raise ConfigError(f"model.path={model_dir}: images of {type(processor).__name__} are not supported yet")
    return processor


def _levels(processor: Any) -> np.ndarray:
    """Return the processor's value for each brightness of each channel: [channels, 256] fp32."""
    image = np.tile(np.arange(256, dtype=np.uint8)[None, None], (3, 1, 1))
    if processor.do_rescale:
        image = processor.rescale(image, processor.rescale_factor)
    if processor.do_normalize:
        image = processor.normalize(image, processor.image_mean, processor.image_std)
    return np.ascontiguousarray(image[:, 0], dtype=np.float32)


def upright_rgb(image: Image) -> Image:
    """Decode an image in upright orientation, with transparent parts on white, as Qwen's own tools do."""
    from PIL import Image as images
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # 16-bit grey: keep the upper byte, as Pillow does for 16-bit colours. Its convert() clips to 255, which is white.
        image = images.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = images.new("RGBA", image.size, (255, 255, 255, 255))
        image = images.alpha_composite(white, image)
    return image.convert("RGB")


def _save(file: Path, values: np.ndarray) -> None:
    content = io.BytesIO()
    np.save(content, values, allow_pickle=False)
    _write_whole(file, content.getvalue())


def _write_whole(file: Path, content: bytes) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(file)
