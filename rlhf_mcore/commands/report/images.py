"""The images of prompts in a report: small copies inside the page, as data URLs."""

from __future__ import annotations

import io
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_mcore.foreign import read_bytes

IMAGES = "images"  # the folder of a run, with a file for every digest
MAX_IMAGES = 500  # of a run in a page
MAX_BYTES = 8 * 2**20  # of these, as files, in all
SIDE = 256  # pixels: a larger image is scaled down to it
_MAX_FILE_BYTES = 64 * 2**20
_MAX_PIXELS = 64 * 2**20
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


def images_of(directory: Path, groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the images of groups as data URLs by digest: those of the last groups first, as many as a page holds.

    An image whose file is missing, or is none, is left out.
    """
    found: dict[str, str] = {}
    room = MAX_BYTES
    for digest in _digests(groups):
        if len(found) == MAX_IMAGES:
            break
        content = _small(directory / IMAGES / digest)
        if content is None:
            continue
        if len(content) > room:
            break
        room -= len(content)
        kind = "png" if content.startswith(b"\x89PNG") else "jpeg"
        found[digest] = f"data:image/{kind};base64,{b64encode(content).decode()}"
    return found


def _digests(groups: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """List digests, each once. What is none could be the path of another file."""
    named = (digest for group in reversed(groups) for digest in group.get(IMAGES) or ())
    return dict.fromkeys(digest for digest in named if isinstance(digest, str) and _DIGEST.fullmatch(digest))


@lru_cache(maxsize=2 * MAX_IMAGES)  # a page that is served is made again and again; a file of a digest stays what it is
def _small(path: Path) -> bytes | None:
    """Return an image, upright and scaled down, as PNG where it has few pixels and as JPEG else; None: it cannot be read."""
    from PIL import Image

    from rlhf_mcore.data.image_rows import upright_rgb

    try:
        file = Image.open(io.BytesIO(read_bytes(path, limit=_MAX_FILE_BYTES)), formats=_FORMATS)
        if file.width * file.height > _MAX_PIXELS:
            return None
        file.draft("RGB", (SIDE, SIDE))
        image = upright_rgb(file)
    except Exception:  # whatever a decoder raises of a file that nobody trusts
        return None
    image.thumbnail((SIDE, SIDE))
    content = io.BytesIO()
    image.save(content, "PNG" if image.width * image.height <= SIDE**2 // 4 else "JPEG", quality=80)
    return content.getvalue()
