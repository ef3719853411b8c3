"""Scale images to one square. Tokens and pixels equal those from transformers' own processor."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data.image_rows import ImageReader
from rlhf_mcore.data.images import ImageStore, whole_images
from rlhf_mcore.data.source import load_prompts

SPECIAL = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
EDGE, PATCH, TOKENS = 24, 4, 9
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<start_of_image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def make_tokenizer() -> Any:
    """Build a tokenizer with a token per character, and for two and three line ends, as Gemma's."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", *SPECIAL, "\n", "\n\n", "\n\n\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n{1,3}|[\s\S]"), "isolated")
    core.add_special_tokens(SPECIAL)
    named = dict(zip(("boi_token", "eoi_token", "image_token"), SPECIAL, strict=True))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", eos_token="<eos>", extra_special_tokens=named
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    numbers = {"boi_token_index": 2, "eoi_token_index": 3, "image_token_index": 4, "mm_tokens_per_image": TOKENS}
    config = {"model_type": "gemma3", "vision_config": {"image_size": EDGE, "patch_size": PATCH}, **numbers}
    (folder / "config.json").write_text(json.dumps(config))
    write_processor(folder)
    return folder


def write_processor(folder: Path, **changes: Any) -> None:
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": EDGE, "width": EDGE},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
        "image_seq_length": TOKENS,
        "do_pan_and_scan": None,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **changes}))


def picture(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def test_tokens_and_pixels_are_those_of_the_models_processor(tmp_path: Path, model_dir: Path) -> None:
    import pyarrow
    from pyarrow import parquet
    from transformers import AutoImageProcessor, Gemma3Processor

    images = [picture(50, 20, 0), picture(24, 24, 1)]
    text = "one\n<image> or\n\n<image>two?"
    row = {"prompt": [{"role": "user", "content": text}], "images": [*map(png, images)], "answer": "1"}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    store, data, tokenizer = (
        ImageStore(tmp_path / "images" / "patches"),
        DataConfig(answer_key="answer"),
        make_tokenizer(),
    )
    reader = ImageReader(store, str(model_dir), data)
    [prompt] = load_prompts([str(tmp_path / "rows.parquet")], tokenizer, data, images=reader)
    own = AutoImageProcessor.from_pretrained(model_dir, backend="pil")
    processor = Gemma3Processor(own, tokenizer, image_seq_length=TOKENS)
    expected = processor(images=images, text=text.replace("<image>", "<start_of_image>"), return_tensors="pt")
    assert prompt.prompt_ids == expected["input_ids"][0].tolist()
    kept = [store.features(digest) for digest in prompt.images]
    assert [image.grid_thw for image in kept] == [(1, 6, 6)] * 2
    for image, whole in zip(kept, expected["pixel_values"], strict=True):
        assert torch.equal(whole_images(image.pixel_values, image.grid_thw, 3)[0], whole)


@pytest.mark.parametrize(
    ("changes", "pixels", "told"),
    [
        ({"do_pan_and_scan": True}, None, "do_pan_and_scan=true is not supported; set it to false"),
        ({"size": {"height": 28, "width": 28}}, None, "size must equal vision_config.image_size=24"),
        ({}, [784, 1568], "scales all images to one size; set it to null"),
    ],
)
def test_what_is_refused(model_dir: Path, changes: dict[str, Any], pixels: list[int] | None, told: str) -> None:
    write_processor(model_dir, **changes)
    with pytest.raises(ConfigError, match=told):
        ImageReader(ImageStore(model_dir / "patches"), str(model_dir), DataConfig(image_pixels=pixels))
