"""Show images of prompts in a report. They are small and few, and other files are excluded."""

from __future__ import annotations

import io
import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rlhf_mcore.commands.report import run_data
from rlhf_mcore.commands.report.page import page
from rlhf_mcore.commands.report.run_data import read_run

ABSENT = "f" * 32


def digest(number: int) -> str:
    return f"{number:032x}"


def png(width: int, height: int, colour: tuple[int, ...] = (220, 40, 40)) -> bytes:
    content = io.BytesIO()
    Image.new("RGBA" if len(colour) == 4 else "RGB", (width, height), colour).save(content, "PNG")
    return content.getvalue()


def write_run(directory: Path, files: dict[str, bytes], *steps: list[Any]) -> Path:
    """Write a run with these images. Each step has a prompt with two samples and the named images."""
    (directory / "images").mkdir(parents=True)
    (directory / "rollouts").mkdir()
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    for name, content in files.items():
        (directory / "images" / name).write_bytes(content)
    for step, named in enumerate(steps, start=1):
        row = {"step": step, "prompt_id": "p", "prompt": "<image>what?", "response": "r", "score": 0.0, "images": named}
        lines = "".join(json.dumps({**row, "sample": sample}) + "\n" for sample in (0, 1))
        (directory / "rollouts" / f"step-{step:06d}.jsonl").write_text(lines)
    return directory


def open_image(url: str) -> Image.Image:
    head, data = url.split(",")
    image = Image.open(io.BytesIO(b64decode(data)))
    assert head == f"data:image/{str(image.format).lower()};base64"
    return image


def test_a_prompt_has_its_images_in_the_page(tmp_path: Path) -> None:
    """Small images are unchanged, large ones are scaled down, and transparent parts become white."""
    files = {digest(1): png(28, 56), digest(2): png(1024, 512), digest(3): png(8, 8, (0, 0, 0, 0))}
    run = read_run(write_run(tmp_path / "run", files, [digest(1), digest(2), digest(3)]), 100)
    assert run.groups[0]["images"] == list(files)
    small, large, clear = (open_image(run.images[name]) for name in files)
    assert (small.size, small.format, small.getpixel((5, 5))) == ((28, 56), "PNG", (220, 40, 40))
    assert (large.size, large.format) == ((256, 128), "JPEG")
    assert clear.getpixel((4, 4)) == (255, 255, 255)
    html = page([run])
    assert all(url in html for url in run.images.values()) and "img-src data:" in html


def test_grey_of_16_bits_is_shown_as_the_model_sees_it(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.new("I;16", (8, 8), 0x9C40).save(content, "PNG")
    run = read_run(write_run(tmp_path / "run", {digest(1): content.getvalue()}, [digest(1)]), 100)
    assert open_image(run.images[digest(1)]).getpixel((4, 4)) == (0x9C, 0x9C, 0x9C)


@pytest.mark.parametrize("named", [ABSENT, "../secret", "/etc/passwd", 7, None, "A" * 32])
def test_what_names_no_image_of_the_run_is_left_out(named: Any, tmp_path: Path) -> None:
    directory = write_run(
        tmp_path / "run", {digest(1): png(8, 8), digest(2): b"no image"}, [named, digest(2), digest(1)]
    )
    (directory / "secret").write_bytes(png(8, 8))
    assert list(read_run(directory, 100).images) == [digest(1)]


def test_a_run_without_images_has_none(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", {}, []), 100)
    assert run.images == {}


@pytest.mark.parametrize("bound", ["number", "bytes"])
def test_of_too_many_images_the_newest_are_kept(bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {digest(number): png(40, 40, (number, 0, 0)) for number in range(4)}
    directory = write_run(tmp_path / "run", files, *([name] for name in files))
    if bound == "number":
        monkeypatch.setattr(run_data, "MAX_IMAGES", 2)
    else:
        size = len(b64decode(read_run(directory, 100).images[digest(3)].split(",")[1]))
        monkeypatch.setattr(run_data, "MAX_BYTES", 2 * size + size // 2)
    assert list(read_run(directory, 100).images) == [digest(3), digest(2)]
