"""Convert every kind of family there and back, bit for bit: tied and untied, odd vocabulary, one key-value head, dense
layers too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mcore.commands.convert.command import main
from tests.unit.bridge.formats import foreign
from tests.unit.bridge.formats.conftest import ALL, HFModel

Get = Callable[[str], HFModel]
LAYOUTS: dict[str, tuple[tuple[int, ...], foreign.Placements]] = {
    "fsdp3": ((3,), foreign.rows_of_fsdp),
    "hybrid2x2": ((2, 2), foreign.hybrid),
    "fsdp2_tp2": ((2, 2), foreign.fsdp_and_tp),
}


def assert_same(directory: Path, expected: dict[str, Tensor]) -> None:
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def convert(*arguments: object) -> None:
    assert main([str(argument) for argument in arguments]) == 0


# One model for each way to name and split a family's tensors.
DIFFERENT = ("qwen2", "qwen3_tied", "phi3", "qwen2_moe", "mixtral", "gpt_oss")
NAMES = [pytest.param(name, marks=[] if name in DIFFERENT else pytest.mark.full) for name in ALL]


@pytest.mark.parametrize("name", NAMES)
def test_hf_to_megatron_to_hf(hf_model: Get, tmp_path: Path, name: str) -> None:
    source, tensors, _ = hf_model(name)
    convert("--from", "hf", "--to", "megatron", source, tmp_path / "megatron", "--verify")
    convert("--from", "megatron", "--to", "hf", tmp_path / "megatron", tmp_path / "hf", "--shard-size", "100KB")
    assert_same(tmp_path / "hf", tensors)
    for companion in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "hf" / companion).read_bytes().strip() == (source / companion).read_bytes().strip()


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, "fsdp3") for name in DIFFERENT), ("qwen2", "hybrid2x2"), ("qwen3_moe", "fsdp2_tp2")],
)
def test_fsdp_to_hf(hf_model: Get, tmp_path: Path, name: str, layout: str) -> None:
    source, tensors, in_memory = hf_model(name)
    foreign.write_fsdp(tmp_path / "fsdp", in_memory, *LAYOUTS[layout])
    convert("--from", "fsdp", "--to", "hf", "--hf-config", source, tmp_path / "fsdp", tmp_path / "hf")
    assert_same(tmp_path / "hf", tensors)


@pytest.mark.parametrize(("name", "padded"), [("qwen2", True), ("llama", False)])
def test_flat_shards_to_hf(hf_model: Get, tmp_path: Path, name: str, padded: bool) -> None:
    source, tensors, _ = hf_model(name)
    foreign.write_flat(tmp_path / "fsdp", tensors, 3, padded=padded)
    convert("--from", "fsdp", "--to", "hf", "--hf-config", source, tmp_path / "fsdp", tmp_path / "hf")
    assert_same(tmp_path / "hf", tensors)


def test_fsdp_to_megatron_to_hf_verified(hf_model: Get, tmp_path: Path) -> None:
    source, tensors, in_memory = hf_model("qwen3_moe")
    wrapped = {f"_fsdp_wrapped_module.{name}": tensor for name, tensor in in_memory.items()}
    foreign.write_fsdp(tmp_path / "fsdp", wrapped, (2,))
    convert("--from", "fsdp", "--to", "megatron", "--hf-config", source, tmp_path / "fsdp", tmp_path / "m", "--verify")
    convert("--from", "megatron", "--to", "hf", tmp_path / "m", tmp_path / "hf", "--verify")
    assert_same(tmp_path / "hf", tensors)


def test_one_rank_and_tensors_that_are_whole_everywhere(hf_model: Get, tmp_path: Path) -> None:
    source, tensors, in_memory = hf_model("qwen3_tied")
    for world in (1, 2):
        directory = tmp_path / f"fsdp{world}"
        directory.mkdir()
        for rank in range(world):
            foreign.save_rank(directory, in_memory, rank, world)
        convert("--from", "fsdp", "--to", "hf", "--hf-config", source, directory, tmp_path / f"hf{world}")
        assert_same(tmp_path / f"hf{world}", tensors)


def test_small_blocks_give_the_same(hf_model: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have a few rows, as have parts in the checkpoint, and files are closed repeatedly."""
    from rlhf_mcore.bridge.files.formats import convert as module

    monkeypatch.setattr(module, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(module, "RELEASE_BYTES", 100_000)
    source, tensors, in_memory = hf_model("qwen3_moe_mixed")
    foreign.write_fsdp(tmp_path / "fsdp", in_memory, (3,))
    config = ("--hf-config", source)
    convert("--from", "fsdp", "--to", "megatron", *config, tmp_path / "fsdp", tmp_path / "m", "--shard-size", "50KB")
    assert len(list((tmp_path / "m" / "release").glob("*.distcp"))) > 5
    convert("--from", "megatron", "--to", "hf", tmp_path / "m", tmp_path / "hf", "--verify")
    assert_same(tmp_path / "hf", tensors)


def test_dtype_is_cast_once_and_named_in_the_config(hf_model: Get, tmp_path: Path) -> None:
    source, tensors, _ = hf_model("qwen3")
    convert("--from", "hf", "--to", "hf", "--dtype", "bf16", source, tmp_path / "hf", "--verify")
    assert_same(tmp_path / "hf", {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_mean_of_models_is_accumulated_in_fp32(hf_model: Get, tmp_path: Path) -> None:
    from tests.distributed.models import make

    source, first, _ = hf_model("llama")
    others: list[dict[str, Any]] = []
    for seed in (1, 2):
        make("llama", tmp_path / str(seed), seed=seed)
        others.append(load_file(tmp_path / str(seed) / "model.safetensors"))
    average = ("--average", tmp_path / "1", tmp_path / "2")
    convert("--from", "hf", "--to", "hf", source, tmp_path / "hf", *average, "--verify")
    assert_same(tmp_path / "hf", {name: (first[name] + others[0][name] + others[1][name]) / 3 for name in first})


def test_a_tied_head_under_its_own_name_and_rotary_buffers_are_left_behind(hf_model: Get, tmp_path: Path) -> None:
    source, tensors, _ = hf_model("qwen3_tied")
    shutil.copytree(source, tmp_path / "source")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    extra["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, **extra}, tmp_path / "source" / "model.safetensors")
    convert("--from", "hf", "--to", "hf", tmp_path / "source", tmp_path / "hf")
    assert_same(tmp_path / "hf", tensors)


def test_mtp_layers_are_kept_by_a_conversion_to_hf_and_left_out_of_megatrons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.distributed.models import add_mtp_layer, make

    make("glm4_moe", source := tmp_path / "source")
    tensors, mtp = load_file(source / "model.safetensors"), add_mtp_layer(source)
    average = ("--average", source, source)
    convert("--from", "hf", "--to", "hf", source, tmp_path / "hf", *average, "--verify")
    assert_same(tmp_path / "hf", tensors | mtp)
    convert("--from", "hf", "--to", "megatron", source, tmp_path / "megatron")
    assert "MTP layers" in capsys.readouterr().err
    convert("--from", "megatron", "--to", "hf", tmp_path / "megatron", tmp_path / "back")
    assert_same(tmp_path / "back", tensors)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back")]
    assert [config["num_nextn_predict_layers"] for config in configs] == [1, 0]
