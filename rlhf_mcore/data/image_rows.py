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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.images import LEVELS, ImageStore, ImageTokens, SquareProcessor
from rlhf_mcore.foreign import read_bytes
from rlhf_mcore.platform.cpu_libraries import declare_image_operators

if TYPE_CHECKING:
    from PIL.Image import Image

    from rlhf_mcore.config.schema import DataConfig

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


def take_images(content: Any, column: Any, place: str) -> RowImages:
    """Return the images of a prompt in the order of their marks.

    Args:
        content: value of the prompt column, not validated yet.
        column: value of the image column. None or empty: the prompt has only the images in its messages.

    Raises:
        ConfigError: the numbers of images and marks differ, or a message part has an unknown type.
    """
    given = _listed(column, place)
    if not isinstance(content, list) and (not isinstance(content, str) or MARK not in content):
        return RowImages(content, content, given)  # the text is already rendered with the model's own image tokens
    turns = content if isinstance(content, list) else [{"role": "user", "content": content}]
    waiting, sources = iter(given), list[Any]()
    asked, written = [], []
    for message in turns:
        if not isinstance(message, Mapping):
            raise ConfigError(f"{place}: a message must be an object with role and content, found {message!r:.60}")
        parts = list(_parts(message.get("content"), waiting, sources, place))
        has_image = any(part["type"] == "image" for part in parts)
        text = "".join(part.get("text", MARK) for part in parts)
        written.append({**message, "content": text})
        asked.append({**message, "content": parts if has_image else text})
    if (unused := len(list(waiting))) or len(sources) > sum(source is not None for source in sources):
        there = len([source for source in sources if source is not None]) + unused
        remedy = f"write {MARK} once for each image"
        if not there:
            remedy = "name their column in data.image_key, or give the row its images"
        raise ConfigError(f"{place}: {len(sources)} x {MARK} in the prompt, but images: {there}; {remedy}")
    return RowImages(asked, written if isinstance(content, list) else content, sources)


def parts_of(content: Any, place: str) -> tuple[list[str], list[Any]] | None:
    """Return the texts between the images of a message's content, and the images; None if the content is not a list of parts.

    Raises:
        ConfigError: a part has an unknown type, or an image has no source.
    """
    if not isinstance(content, list):
        return None
    texts, sources = [""], list[Any]()
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS:
            sources.append(_source_in(part))
            texts.append("")
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts[-1] += part["text"]
        else:
            kinds = ", ".join(_TEXT_PARTS + _IMAGE_PARTS)
            raise ConfigError(f"{place}: message parts must have one of the types {kinds}; found {part!r:.80}")
    if None in sources:
        raise ConfigError(
            f"{place}: image {sources.index(None) + 1} has no source; give image_url, image, bytes or path"
        )
    return texts, sources


def _has_places(content: Any) -> bool:
    messages = content if isinstance(content, list) else [{"content": content}]
    said = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return any(isinstance(turn, list) or (isinstance(turn, str) and MARK in turn) for turn in said)


def _listed(column: Any, place: str) -> list[Any]:
    if column is None:
        return []
    if isinstance(column, (list, tuple)):
        return list(column)
    if isinstance(column, (str, bytes, Mapping)):
        return [column]
    raise ConfigError(f"{place}: the image column contains {type(column).__name__} {column!r:.60}, not images")


def _parts(content: Any, waiting: Iterator[Any], sources: list[Any], place: str) -> Iterator[dict[str, str]]:
    """Yield the parts of a message, and append the source of each image to ``sources``; None for a missing image."""
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS:
            own = _source_in(part)
            sources.append(next(waiting, None) if own is None else own)
            yield {"type": "image"}
            continue
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS else part
        if not isinstance(text, str):
            kinds = ", ".join(_TEXT_PARTS + _IMAGE_PARTS)
            raise ConfigError(
                f"{place}: message content must be a text, or parts with the types {kinds}; found {part!r:.80}"
            )
        pieces = text.split(MARK)
        for number, piece in enumerate(pieces):
            if number:
                sources.append(next(waiting, None))
                yield {"type": "image"}
            if piece or len(pieces) == 1:
                yield {"type": "text", "text": piece}


def _source_in(part: Mapping[str, Any]) -> Any:
    for key in ("image", "image_url", "bytes", "path", "url"):
        value = part.get(key)
        if isinstance(value, Mapping):
            value = value if key == "image" else value.get("url")
        if value is not None:
            return value
    return None


def images_of_row(
    content: Any, column: Any, images: ImageReader | None, folder: Path, place: str
) -> tuple[Any, Any, tuple[str, ...]]:
    """Return a prompt as texts, the same prompt for rendering, and the digests of its images.

    ``images`` is None for a text model.

    Raises:
        ConfigError: the model takes no images; or see ``take_images`` and ``ImageReader.take``.
    """
    if not column and not _has_places(content):
        return content, content, ()
    row = take_images(content, column, place)
    if images is not None:
        return row.messages, row.content, images.take(row.sources, folder, place)
    if row.sources:
        raise ConfigError(
            f"{place}: the prompt has images, but the model takes none; use a vision model, or set data.image_key=null to ignore "
            "the image column"
        )
    return row.messages, row.content, ()


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
            patches = self._refused(lambda: self._processor.get_number_of_image_patches(height, width), place)
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
            image = self._refused(lambda: Image.open(io.BytesIO(content), formats=_FORMATS), place)
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
        patches = self._refused(lambda: self._patches(upright_rgb(image)), place)
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

    def _refused(self, action: Callable[[], Any], place: str) -> Any:
        """Run an action on an untrusted file. Report any exception of a decoder as an error in the row."""
        try:
            return action()
        except Exception as error:
            reason = (
                (str(error) or type(error).__name__)
                .splitlines()[0][:200]
                .replace(" file <_io.BytesIO", "")
                .split(" object at")[0]
            )
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
