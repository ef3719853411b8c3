"""Read images of prompts: their sources, rejected images, and the input of the model's tower."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data.examples import TokenizedExample, example_batch, load_examples
from rlhf_mcore.data.image_rows import ImageReader, take_images
from rlhf_mcore.data.images import ImageStore, placeholders
from rlhf_mcore.data.source import load_prompts
from rlhf_mcore.types import Prompt

PAD = 2
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<|image_pad|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "qwen2_5_vl", "image_token_id": PAD, "vision_config": {"spatial_merge_size": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def picture_tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "<|image_pad|>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.add_special_tokens(["<|image_pad|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return fast


def png(width: int = 56, height: int = 28, seed: int = 0, mode: str = "RGB", kind: str = "PNG") -> bytes:
    rng, content = np.random.default_rng(seed), io.BytesIO()
    values = rng.integers(0, 256, (height, width, len(mode)), dtype=np.uint8)
    Image.fromarray(values if len(mode) > 1 else values[..., 0], mode).save(content, kind)
    return content.getvalue()


def ask(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def message_of(action: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


def reader(folder: Path, model_dir: Path, **data: Any) -> ImageReader:
    return ImageReader(ImageStore(folder / "images" / "patches"), str(model_dir), DataConfig(**data))


def load(
    tmp_path: Path, model_dir: Path, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]]
) -> list[Prompt]:
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    return load_prompts([str(tmp_path / "a.parquet")], tokenizer, DataConfig(), images=reader(tmp_path, model_dir))


def test_rows_of_the_field_are_rendered_with_as_many_tokens_as_the_processor_makes(
    tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The sizes are in cells of 28 pixels, one token per cell."""
    (tmp_path / "b.png").write_bytes(png(28, 84))
    rows = [
        {"prompt": ask("a<image>b"), "images": [{"bytes": png(56, 28), "path": None}]},
        {
            "prompt": ask("<image><image>c"),
            "images": [{"bytes": png(28, 28), "path": None}, {"bytes": None, "path": "b.png"}],
        },
        {"prompt": ask("text"), "images": None},
    ]
    first, second, text = load(tmp_path, model_dir, picture_tokenizer, rows)
    ids = picture_tokenizer.convert_tokens_to_ids
    assert first.prompt_ids == [ids("a"), PAD, PAD, ids("b")]
    assert second.prompt_ids == [PAD, PAD, PAD, PAD, ids("c")]
    assert first.messages == ask("a<image>b")
    assert (len(first.images), len(second.images), text.images) == (1, 2, ())
    assert text.prompt_ids == [*map(ids, "text")]


def test_content_parts_of_openai_and_a_plain_string(
    tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase
) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(28, 28)).decode()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "c.jpg").write_bytes(png(56, 56, kind="JPEG"))
    rows: list[dict[str, Any]] = [
        {"prompt": ask([{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {"url": url}}])},
        {"prompt": "<image>z", "images": ["pictures/c.jpg"]},
        {"prompt": ask([{"type": "text", "text": "x"}, {"type": "text", "text": "y"}])},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(
        [str(tmp_path / "a.jsonl")], picture_tokenizer, DataConfig(), images=reader(tmp_path, model_dir)
    )
    ids = picture_tokenizer.convert_tokens_to_ids
    assert [prompt.prompt_ids for prompt in prompts] == [[ids("q"), PAD], [PAD] * 4 + [ids("z")], [ids("x"), ids("y")]]
    assert prompts[0].messages == ask("q<image>")


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_the_tower_gets_what_the_processor_of_transformers_makes(mode: str, tmp_path: Path, model_dir: Path) -> None:
    from transformers import AutoImageProcessor

    content = png(75, 190, mode=mode)
    images = reader(tmp_path, model_dir)
    (digest,) = images.take([content], tmp_path, "row 0")
    found = ImageStore(tmp_path / "images" / "patches").features(digest)
    picture = Image.open(io.BytesIO(content))
    if mode == "RGBA":
        background = Image.new("RGBA", picture.size, "white")
        background.alpha_composite(picture)
        picture = background
    expected = AutoImageProcessor.from_pretrained(model_dir, backend="pil")(
        images=[picture.convert("RGB")], return_tensors="pt"
    )
    assert [list(found.grid_thw)] == expected["image_grid_thw"].tolist()
    assert torch.equal(found.pixel_values, expected["pixel_values"])
    assert ImageStore(tmp_path / "images" / "patches").content(digest) == content


def test_grey_of_16_bits_keeps_its_upper_half(tmp_path: Path, model_dir: Path) -> None:
    """Pillow's own conversion clips to 255, so every value from 255 to 65,535 would be white."""
    content = io.BytesIO()
    Image.fromarray(np.array([[0, 0x9C40], [0x00FF, 0xFFFF]], np.uint16).repeat(28, 0).repeat(28, 1)).save(
        content, "PNG"
    )
    images = reader(tmp_path, model_dir)
    (digest,) = images.take([content.getvalue()], tmp_path, "row 0")
    expected = io.BytesIO()
    Image.fromarray(np.array([[0, 0x9C], [0, 0xFF]], np.uint8).repeat(28, 0).repeat(28, 1)).save(expected, "PNG")
    (same,) = images.take([expected.getvalue()], tmp_path, "row 1")
    store = ImageStore(tmp_path / "images" / "patches")
    assert torch.equal(store.features(digest).pixel_values, store.features(same).pixel_values)


def test_pictures_are_scaled_to_the_range_of_the_configuration(tmp_path: Path, model_dir: Path) -> None:
    images = reader(tmp_path, model_dir, image_pixels=[28 * 28, 4 * 28 * 28])
    (digest,) = images.take([png(280, 280)], tmp_path, "row 0")
    assert images.expand([PAD], (digest,), "row 0") == [PAD] * 4


def test_an_image_of_several_rows_is_kept_once(tmp_path: Path, model_dir: Path) -> None:
    images = reader(tmp_path, model_dir)
    assert images.take([png()], tmp_path, "row 0") == images.take([png()], tmp_path, "row 1")
    assert len(list((tmp_path / "images" / "patches").glob("[0-9a-f]*.npy"))) == 1


def test_a_damaged_file_of_patches_is_named(tmp_path: Path, model_dir: Path) -> None:
    (digest,) = reader(tmp_path, model_dir).take([png()], tmp_path, "row 0")
    file = tmp_path / "images" / "patches" / f"{digest}.npy"
    file.write_bytes(file.read_bytes()[:100])
    message = message_of(lambda: ImageStore(file.parent).features(digest))
    assert message.startswith(f"{file} is damaged") and "remove its folder" in message


def test_the_ranks_of_a_machine_share_the_work(tmp_path: Path, model_dir: Path) -> None:
    store, folder = ImageStore(tmp_path / "images" / "patches"), str(model_dir)
    sources = [png(seed=seed) for seed in range(8)]
    counts = []
    for rank in range(2):
        ImageReader(store, folder, DataConfig(), (rank, 2)).take(sources, tmp_path, "row 0")
        counts.append(len(list((tmp_path / "images" / "patches").glob("[0-9a-f]*.npy"))))
    assert 0 < counts[0] < 8 and counts[1] == 8


def header_of(width: int, height: int) -> bytes:
    """Write the first two chunks of a PNG. Pillow can read its size, but no pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", b"")
    )


BOMB = io.BytesIO()  # 16 million pixels in 16 kilobytes
Image.new("L", (4000, 4000)).save(BOMB, "PNG")


@pytest.mark.parametrize(
    "source, expected",
    [
        (b"no image at all", "it cannot be read"),
        (png()[:200], "it cannot be read (image file is truncated)"),
        (b"", "an image must be bytes, a path or a data URL"),
        (7, "found int 7"),
        ({"bytes": None, "path": None}, "an image must be bytes, a path or a data URL"),
        ("absent.png", "absent.png: no such file"),
        ("https://example.org/a.png", "URLs are not downloaded; download the images"),
        ("data:image/png;base64,%%%", "its data URL is not base64"),
        ("data:application/pdf;base64,iVBO", "data:application/pdf;base64,iVBO is not an image data URL"),
        ("iVBO" * 100, "write data:image/png;base64, before it"),
        ("iVBO" * 10_000, "write data:image/png;base64, before it"),
        (BOMB.getvalue(), "4000 by 4000 pixels, more than data.max_image_pixels=1000000"),
        (header_of(30_000, 30_000), "30000 by 30000 pixels, more than data.max_image_pixels=1000000"),
        (b"\x00" * 300_000, "more than data.max_row_bytes=200000 bytes"),
        ("large.png", "more than data.max_row_bytes=200000 bytes"),
        (png(2800, 12), "aspect ratio"),
    ],
)
def test_a_bad_image_is_refused_by_its_row(source: Any, expected: str, tmp_path: Path, model_dir: Path) -> None:
    images = reader(tmp_path, model_dir, max_image_pixels=1_000_000, max_row_bytes=200_000)
    (tmp_path / "large.png").write_bytes(b"\x00" * 300_000)
    message = message_of(lambda: images.take([png(), source], tmp_path, "a.parquet, row 3"))
    assert message.startswith("a.parquet, row 3, image 2: ") and expected in message and len(message) < 500


def test_more_images_than_allowed_are_refused_before_any_is_read(tmp_path: Path, model_dir: Path) -> None:
    images = reader(tmp_path, model_dir, max_images=1)
    assert "2 images, more than data.max_images=1" in message_of(lambda: images.take([b"", b""], tmp_path, "row 0"))


@pytest.mark.parametrize(
    "content, column, expected",
    [
        (ask("a<image>"), [b"1", b"2"], "1 x <image> in the prompt, but images: 2"),
        (ask("<image><image>"), [b"1"], "2 x <image> in the prompt, but images: 1"),
        (ask([{"type": "video"}]), None, "parts with the types"),
        (ask("a<image>"), 5, "contains int 5, not images"),
        (ask("a<image>"), None, "images: 0; name their column in data.image_key, or give the row its images"),
    ],
)
def test_places_and_images_must_agree(content: Any, column: Any, expected: str) -> None:
    assert expected in message_of(lambda: take_images(content, column, "row 0"))


def test_a_model_that_sees_nothing_is_not_given_images(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "<image>a", "images": ["b.png"]}) + "\n")
    files = [str(tmp_path / "a.jsonl")]
    assert "the model takes none; use a vision model, or set data.image_key=null" in message_of(
        lambda: load_prompts(files, tokenizer, DataConfig())
    )
    (prompt,) = load_prompts(files, tokenizer, DataConfig(image_key=None))
    assert "<image>a" in prompt.text and prompt.images == ()


@pytest.mark.parametrize("prompt", ["<image>a", ask("<image>a")])
def test_a_place_without_an_image_is_refused_where_the_column_has_another_name(
    prompt: Any, tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt, "image": ["b.png"], "response": "c"}) + "\n")
    files, images = [str(tmp_path / "a.jsonl")], reader(tmp_path, model_dir)
    expected = "a.jsonl, line 1: 1 x <image> in the prompt, but images: 0; name their column in data.image_key"
    assert expected in message_of(lambda: load_prompts(files, picture_tokenizer, DataConfig(), images=images))
    given = {"max_tokens": 99, "drop_longer": False, "images": images}
    assert expected in message_of(lambda: load_examples(files, picture_tokenizer, CONVERSATIONS, **given))
    (text,) = load_prompts(files, picture_tokenizer, DataConfig(image_key=None), images=images)
    assert "<image>a" in text.text and text.images == ()


def test_a_prompt_without_a_place_for_its_image_is_told_to_have_one(
    tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase
) -> None:
    message = message_of(lambda: load(tmp_path, model_dir, picture_tokenizer, [{"prompt": "a", "images": [png()]}]))
    assert "contain 0 image tokens for 1 images; write <image> once for each image" in message


def test_objects_of_a_column_may_have_the_keys_of_parts(tmp_path: Path, model_dir: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    objects = [{"bytes": png(), "path": "a"}, {"image": png()}, {"image_url": {"url": url}}, {"url": url}]
    assert len(set(reader(tmp_path, model_dir).take(objects, tmp_path, "row 0"))) == 1


def test_a_prompt_that_holds_the_token_itself_is_refused(
    tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": ask("<image><|image_pad|>"), "images": [{"bytes": png()}]}]
    with pytest.raises(ConfigError, match="contain 2 image tokens for 1 images"):
        load(tmp_path, model_dir, picture_tokenizer, rows)


def test_prompts_count_the_tokens_of_their_images(
    tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": ask("a<image>"), "images": [{"bytes": png(112, 112)}]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    cfg = DataConfig(max_prompt_tokens=16)
    message = message_of(
        lambda: load_prompts([str(tmp_path / "a.parquet")], picture_tokenizer, cfg, images=reader(tmp_path, model_dir))
    )
    assert "with 17 tokens" in message


def test_where_the_tokens_of_images_are() -> None:
    """After the tokens of the prompt's images, image tokens written by the policy count as text."""
    assert placeholders([5, 9, 9, 6, 9, 7, 9], 9, [2, 1]) == [(1, 2), (4, 1)]
    assert placeholders([9, 9, 9], 9, [1, 2]) == [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match="image 1 has 2 tokens"):
        placeholders([9, 5, 9], 9, [2])
    with pytest.raises(ValueError, match="image 2 has 2 tokens"):
        placeholders([9, 5, 9], 9, [1, 2])


PAIRS = {"data.prompt_key": "prompt", "data.chosen_key": "chosen", "data.rejected_key": "rejected"}
CONVERSATIONS = {"data.prompt_key": "prompt", "data.response_key": "response"}


def load_given(
    tmp_path: Path,
    model_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    max_tokens: int = 100,
) -> list[TokenizedExample]:
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    files, images = [str(tmp_path / "a.parquet")], reader(tmp_path, model_dir)
    return load_examples(files, tokenizer, columns, max_tokens=max_tokens, drop_longer=False, images=images)


def test_a_pair_of_responses_shares_the_images_of_its_prompt(
    tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase, world: None
) -> None:
    rows = [
        {"prompt": ask("plain"), "images": None, "chosen": "a", "rejected": "b"},
        {"prompt": ask("x<image>y"), "images": [{"bytes": png(56, 28)}], "chosen": "a", "rejected": "bc"},
    ]
    plain, seen = load_given(tmp_path, model_dir, picture_tokenizer, rows, PAIRS)
    (rollout,) = load(tmp_path, model_dir, picture_tokenizer, rows[1:])
    assert plain.images == () and seen.images == rollout.images != ()
    assert (
        seen.prompt_ids.tolist()
        == rollout.prompt_ids
        == [*picture_tokenizer.encode("x"), PAD, PAD, *picture_tokenizer.encode("y")]
    )
    assert seen.num_tokens == 4 + len("bc") + 1
    batch = example_batch([plain, seen], with_mismatched=True)
    for found in (batch, batch.mismatched):
        assert found is not None and found.images_of([0, 1, 2, 3]) == [(), (), seen.images, seen.images]
        found.sequences, found.images = {1: (1, 1), 2: (1, 2)}, {2: [["a"], []], 3: [["b"]]}
        assert found.images_of([0, 1, 2, 3]) == [(), (), (), ("a",), (), ("b",)]
    assert example_batch([plain]).images_of([0, 1]) is None


def test_a_conversation_of_parts_is_learned_from_with_its_images(
    tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The rows have the format of llava-instruct-mix-vsft: every part has all fields, and a column contains the images."""

    def part(kind: str, text: str | None = None) -> dict[str, Any]:
        return {"type": kind, "text": text, "index": 0 if kind == "image" else None}

    turns = [
        [part("image"), part("text", "q")],
        [part("text", "a")],
        [part("text", "r")],
        [part("text", "b"), part("text", "c")],
    ]
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    (example,) = load_given(
        tmp_path,
        model_dir,
        picture_tokenizer,
        [{"messages": messages, "images": [{"bytes": png(28, 56)}]}],
        CONVERSATIONS,
    )
    ids, eos = picture_tokenizer.convert_tokens_to_ids, picture_tokenizer.eos_token_id
    assert example.prompt_ids.tolist() == [PAD, PAD, *map(ids, "qar")]
    assert [response.tolist() for response in example.response_ids] == [[*map(ids, "bc"), eos]]


def test_examples_count_the_tokens_of_their_images(
    tmp_path: Path, model_dir: Path, picture_tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": ask("<image>"), "images": [{"bytes": png(112, 112)}], "response": "a"}
    message = message_of(
        lambda: load_given(tmp_path, model_dir, picture_tokenizer, [row], CONVERSATIONS, max_tokens=17)
    )
    assert "longer than 17 tokens, the longest has 18" in message


def test_examples_of_a_model_that_sees_nothing_are_refused_their_images(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": "<image>a", "images": ["b.png"], "response": "c"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    given = [str(tmp_path / "a.jsonl")], tokenizer, CONVERSATIONS
    assert "the model takes none" in message_of(lambda: load_examples(*given, max_tokens=99, drop_longer=False))
    (example,) = load_examples(*given, max_tokens=99, drop_longer=False, data=DataConfig(image_key=None))
    assert example.images == ()
