from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_mcore.bridge.files.hf_files import INDEX, SINGLE, HFReader, copy_companions
from rlhf_mcore.config.errors import ConfigError
from tests.distributed.models import make
from tests.messages import expect_error

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return a model in transformers' files with several shards, and its tensors."""
    directory = tmp_path_factory.mktemp("saved")
    model = make("qwen2", directory)
    assert isinstance(model, PreTrainedModel)
    (directory / SINGLE).unlink()
    model.save_pretrained(directory, max_shard_size="200KB")
    assert (directory / INDEX).is_file()
    return directory, {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}


@pytest.fixture
def sharded_files(tmp_path: Path) -> Path:
    """Write two tensors in two shards."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": torch.arange(6.0).view(2, 3)}, directory / FIRST)
    save_file({"b": torch.arange(4.0)}, directory / SECOND)
    write_index(directory, {"a": FIRST, "b": SECOND})
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw(header: object, data: bytes = b"", size: int | None = None) -> bytes:
    """Write a safetensors file by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


# ------------------------------------------------------------------------------------------------------------- reading
def test_every_rectangle_is_that_of_the_model(saved_model: tuple[Path, dict[str, Tensor]]) -> None:
    directory, tensors = saved_model
    reader = HFReader(directory)
    assert reader.names == set(tensors)
    for name, tensor in tensors.items():
        assert reader.shape(name) == tuple(tensor.shape)
        inner = tuple(slice(size // 3, size // 3 + size // 2) for size in tensor.shape)
        for where in (inner, tuple(slice(0, size) for size in tensor.shape)):
            part = reader.read(name, where)
            assert part.dtype == tensor.dtype and torch.equal(part, tensor[where])


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"x": torch.arange(12.0).view(3, 4).bfloat16()}, tmp_path / SINGLE)
    reader = HFReader(str(tmp_path))
    assert reader.names == {"x"} and reader.shape("x") == (3, 4)
    part = reader.read("x", (slice(1, 3), slice(2, 4)))
    assert part.dtype == torch.bfloat16 and part.tolist() == [[6, 7], [10, 11]]


def test_all_tensors_come_whole_and_once(sharded_files: Path) -> None:
    scalar = sharded_files.parent / "scalar"
    scalar.mkdir()
    save_file({"s": torch.tensor(3.0)}, scalar / SINGLE)
    assert [(name, tensor.tolist()) for name, tensor in HFReader(scalar).tensors()] == [("s", 3.0)]
    found = [(name, tensor.tolist()) for name, tensor in HFReader(sharded_files).tensors()]
    assert found == [("a", [[0, 1, 2], [3, 4, 5]]), ("b", [0, 1, 2, 3])]


def test_a_missing_tensor_is_named(sharded_files: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{sharded_files}: tensor model.norm.weight is missing"):
        HFReader(sharded_files).shape("model.norm.weight")


def test_a_tensor_that_is_not_where_the_index_says_is_named(sharded_files: Path) -> None:
    write_index(sharded_files, {"a": SECOND, "b": SECOND})
    with expect_error(ConfigError, field=sharded_files / SECOND, value="tensor a"):
        HFReader(sharded_files).read("a", (slice(0, 1), slice(0, 1)))


def test_missing_files_are_named(sharded_files: Path, tmp_path: Path) -> None:
    (sharded_files / SECOND).unlink()
    with pytest.raises(ConfigError, match=rf"{sharded_files}: weight file {SECOND} is missing"):
        HFReader(sharded_files)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"weight file {SINGLE} is missing"):
        HFReader(tmp_path / "empty")


@pytest.mark.parametrize("shard", ["../outside.safetensors", "sub/x.safetensors", "..", ".", ""])
def test_an_index_cannot_lead_out_of_its_directory(sharded_files: Path, shard: str) -> None:
    save_file({"b": torch.zeros(4)}, sharded_files.parent / "outside.safetensors")
    (sharded_files / "sub").mkdir()
    save_file({"b": torch.zeros(4)}, sharded_files / "sub" / "x.safetensors")
    write_index(sharded_files, {"a": FIRST, "b": shard})
    with pytest.raises(ConfigError, match=r"is not a plain file name|is missing"):
        HFReader(sharded_files)


def test_an_index_cannot_name_an_absolute_path(sharded_files: Path) -> None:
    write_index(sharded_files, {"a": FIRST, "b": str(sharded_files / SECOND)})
    with expect_error(ConfigError, field=INDEX, value=sharded_files / SECOND):
        HFReader(sharded_files)


@pytest.mark.parametrize("target", [SECOND, SINGLE])
def test_a_link_cannot_lead_out_of_its_directory(sharded_files: Path, target: str) -> None:
    outside = sharded_files.parent / "outside.safetensors"
    os.rename(sharded_files / SECOND, outside)
    (sharded_files / target).symlink_to(outside)
    if target == SINGLE:
        (sharded_files / INDEX).unlink()
    with expect_error(ConfigError, field=sharded_files / target, value=outside):
        HFReader(sharded_files)


def test_the_links_of_a_hugging_face_cache_are_followed(sharded_files: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--x--y"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in (FIRST, SECOND):
        os.rename(sharded_files / name, repository / "blobs" / f"hash-of-{name}")
        (snapshot / name).symlink_to(f"../../blobs/hash-of-{name}")
    os.rename(sharded_files / INDEX, snapshot / INDEX)
    assert HFReader(snapshot).read("b", (slice(1, 3),)).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested deeper than 32"),
        ("[]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": ["a"]}', "weight_map=.'a'., not an object"),
        ('{"weight_map": {"a": 1}}', "weight_map.a=1, not a text"),
        (f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}', "key 'a' appears twice"),
    ],
)
def test_a_malformed_index_is_named(sharded_files: Path, text: str, message: str) -> None:
    (sharded_files / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=rf"{sharded_files / INDEX}.*{message}"):
        HFReader(sharded_files)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "half a header": lambda whole: whole[:20],
    "truncated": lambda whole: whole[:-4],
    "oversized header": lambda whole: raw({"x": ENTRY}, bytes(8), size=2**62),
    "header of the whole address space": lambda whole: raw({"x": ENTRY}, bytes(8), size=2**64 - 1),
    "overlapping offsets": lambda whole: raw({"x": ENTRY, "y": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
    "two tensors in one place": lambda whole: raw({"x": ENTRY, "y": ENTRY}, bytes(8)),
    "offsets beyond the end": lambda whole: raw({"x": {**ENTRY, "data_offsets": [0, 800]}}, bytes(8)),
    "a shape that is not the data's": lambda whole: raw({"x": {**ENTRY, "shape": [3]}}, bytes(8)),
    "not json": lambda whole: raw(b"{]", bytes(8)),
    "pickle": lambda whole: b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01x\x94]\x94(K\x01K\x02es.",
    "a zip archive, as torch.save writes": lambda whole: b"PK\x03\x04" + bytes(200),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named_and_nothing_else_is_raised(tmp_path: Path, kind: str) -> None:
    path = tmp_path / SINGLE
    save_file({"x": torch.arange(2.0)}, path)
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{path}: not a readable safetensors file"):
        HFReader(tmp_path)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_shard_is_named(sharded_files: Path, kind: str) -> None:
    path = sharded_files / SECOND
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    reader = HFReader(sharded_files)
    assert reader.shape("a") == (2, 3)
    with pytest.raises(ConfigError, match=rf"{path}: not a readable safetensors file"):
        reader.shape("b")


# ---------------------------------------------------------------------------------------------------------- companions
def test_config_and_tokenizer_travel_along_and_nothing_else(tmp_path: Path) -> None:
    model, tokenizer, target = (tmp_path / name for name in ("model", "tokenizer", "target"))
    for directory in (model, tokenizer, target):
        directory.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    for name in ("generation_config.json", "pytorch_model.bin", "README.md", "modeling_custom.py", INDEX):
        (model / name).write_text(f"model {name}")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", "config.json"):
        (tokenizer / name).write_text(f"tokenizer {name}")
    copy_companions([model, tokenizer], target, torch.bfloat16)
    assert {p.name: p.read_text() for p in target.iterdir() if p.name != "config.json"} == {
        "generation_config.json": "model generation_config.json",
        "tokenizer.json": "tokenizer tokenizer.json",
        "chat_template.jinja": "tokenizer chat_template.jinja",
    }
    assert json.loads((target / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}


def test_the_copied_config_says_what_the_updates_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}')
    target = tmp_path / "target"
    target.mkdir()
    updates = {"architectures": ["LlamaForTokenClassification"], "id2label": {"0": "value"}}
    copy_companions([tmp_path], target, torch.float32, updates)
    assert json.loads((target / "config.json").read_text()) == {**updates, "torch_dtype": "float32"}


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja", "vocab.json"])
def test_a_link_out_of_the_directory_is_not_copied(tmp_path: Path, name: str) -> None:
    """The link's target may be a secret of the user who converts."""
    (model := tmp_path / "model").mkdir()
    (target := tmp_path / "target").mkdir()
    (model / "config.json").write_text('{"torch_dtype": "float32"}')
    (model / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text('{"of": "somebody"}')
    (model / name).symlink_to(tmp_path / "secret")
    with expect_error(ConfigError, field=name, value=tmp_path / "secret"):
        copy_companions([model], target, torch.float32)
    assert list(target.iterdir()) == []
    (model / name).unlink()
    (model / "held").write_text('{"torch_dtype": "float32"}')
    (model / name).symlink_to("held")  # within the directory
    copy_companions([model], target, torch.float32)
    assert (target / name).is_file() and not (target / name).is_symlink()


def test_the_links_of_a_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    (blobs := tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    (snapshot := blobs.parent / "snapshots" / "0123").mkdir(parents=True)
    (target := tmp_path / "target").mkdir()
    for name, content in {"config.json": '{"torch_dtype": "float32"}', "tokenizer.json": "{}"}.items():
        (blobs / f"of-{name}").write_text(content)
        (snapshot / name).symlink_to(f"../../blobs/of-{name}")
    copy_companions([snapshot], target, torch.bfloat16)
    assert json.loads((target / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    assert (target / "tokenizer.json").read_text() == "{}"
