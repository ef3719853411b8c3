"""Read a run's checkpoint whose actor is a PEFT directory, like the commands do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mcore.bridge.files.hf_files import adapter_config
from rlhf_mcore.bridge.files.state_files import STATE_INDEX, RankState, make_index, state_file
from rlhf_mcore.bridge.map.rules import hf_shapes, layer_names, pieces
from rlhf_mcore.checkpoint.delta import verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import MANIFEST
from rlhf_mcore.checkpoint.manifest import files_below, hash_files, read_manifest, write_manifest
from rlhf_mcore.cli.main import main
from rlhf_mcore.cli.saved_checkpoint import check_saved
from rlhf_mcore.commands.evaluate.checkpoints import EvaluatedModel, find_model
from rlhf_mcore.commands.evaluate.weights import open_weights, weight_sketches
from rlhf_mcore.commands.push import collect
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.adapters import hf_names
from rlhf_mcore.geometry import AdapterSizes, Shard, StateShard
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlhf_mcore.readers.model_files import read_geometry
from tests.messages import expect_error

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "checkpoint_v1" / "checkpoint-2"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a checkpoint in ``run`` with adapters of the model in ``base``. The other parts come from an earlier release."""
    base, made = tmp_path / "base", tmp_path / "run" / "checkpoint-2"
    shutil.copytree(SAMPLE / "actor", base)
    shutil.rmtree(base / "training")
    shutil.copytree(SAMPLE, made)
    scalars = json.loads((SAMPLE / "actor" / "training" / STATE_INDEX).read_text())["scalars"]
    shutil.rmtree(made / "actor")
    write_actor(made / "actor", base, scalars)
    seal(made)
    (tmp_path / "run" / "latest").symlink_to("checkpoint-2")
    return made


def write_actor(actor: Path, base: Path, scalars: dict[str, object]) -> None:
    geometry = replace(read_geometry(base), adapter=AdapterSizes(4, 12.0, ("q_proj", "v_proj", "down_proj")))
    torch.manual_seed(0)
    (actor / "training").mkdir(parents=True)
    save_file({name: torch.randn(shape) for name, shape in hf_shapes(geometry).items()}, actor / ADAPTER_WEIGHTS)
    (actor / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(geometry, str(base))))
    shutil.copyfile(base / "tokenizer.json", actor / "tokenizer.json")
    shards = []
    for name in (name for layer in range(geometry.num_layers) for name in layer_names(geometry, layer, 0)):
        size = sum(piece.numel for piece in pieces(name, geometry, Shard(0, 1)))
        moments = {kind: torch.rand(size) for kind in ("exp_avg", "exp_avg_sq")}
        shards.append(StateShard(name, Shard(0, 1), 0, size, moments))
    state = RankState(shards, geometry)
    state.write(actor / "training" / state_file(0))
    index = make_index({0: state.described}, geometry, scalars)
    (actor / "training" / STATE_INDEX).write_text(json.dumps(index))


def seal(checkpoint: Path) -> None:
    info = read_manifest(checkpoint).info
    files = hash_files(checkpoint, [name for name in files_below(checkpoint) if name != MANIFEST])
    write_manifest(checkpoint, files, info, Disk())


def merge(checkpoint: Path) -> dict[str, Tensor]:
    """Merge weights as PEFT's ``merge_and_unload`` defines it. PEFT 0.21 gives the same bits."""
    weights = load_file(checkpoint.parents[1] / "base" / "model.safetensors")
    adapters = load_file(checkpoint / "actor" / ADAPTER_WEIGHTS)
    for name, weight in weights.items():
        a, b = hf_names(name.removesuffix(".weight"))
        if a in adapters:
            weight += (adapters[b] @ adapters[a]) * 3.0
    return weights


def convert(*arguments: object) -> int:
    return main(["convert", "--to", "hf", *map(str, arguments)])


def test_it_is_whole_and_one_that_a_run_can_resume_from(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_chain(checkpoint) == []
    check_saved(checkpoint, {"actor": checkpoint / "actor"})
    assert main(["verify-checkpoint", str(checkpoint)]) == 0
    (checkpoint.parents[1] / "base").rename(checkpoint.parents[1] / "moved")
    assert main(["verify-checkpoint", str(checkpoint)]) == 0  # the adapter files are intact
    assert "base_model_name_or_path" in capsys.readouterr().out
    check_saved(checkpoint, {"actor": checkpoint / "actor"}, base=str(checkpoint.parents[1] / "moved"))
    tensors = load_file(checkpoint / "actor" / ADAPTER_WEIGHTS)
    name = min(tensors)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, checkpoint / "actor" / ADAPTER_WEIGHTS)
    with expect_error(ConfigError, field=name):
        check_saved(checkpoint, {"actor": checkpoint / "actor"}, base=str(checkpoint.parents[1] / "moved"))


def test_a_manifest_without_the_adapters_is_refused(checkpoint: Path) -> None:
    (checkpoint / "actor" / ADAPTER_WEIGHTS).unlink()
    seal(checkpoint)
    assert [(p.path, p.kind) for p in verify_chain(checkpoint)] == [(f"actor/{ADAPTER_WEIGHTS}", "absent")]


def test_state_of_other_tensors_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "actor" / "training" / STATE_INDEX
    index = json.loads(path.read_text())
    removed = sorted(index["tensors"])[0]
    del index["tensors"][removed]
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=removed):
        check_saved(checkpoint, {"actor": checkpoint / "actor"})


def test_convert_copies_adapters_or_merges_them(checkpoint: Path, tmp_path: Path) -> None:
    assert convert("--from", "checkpoint", checkpoint.parent, tmp_path / "copy") == 0
    names = [ADAPTER_CONFIG, ADAPTER_WEIGHTS, "tokenizer.json"]
    assert files_below(tmp_path / "copy") == names
    assert all((tmp_path / "copy" / n).read_bytes() == (checkpoint / "actor" / n).read_bytes() for n in names)
    wanted = merge(checkpoint)
    for source in (("--from", "checkpoint", checkpoint), ("--from", "hf", tmp_path / "copy")):
        assert convert(*source, tmp_path / "whole", "--merge", "--verify", "--overwrite") == 0
        written = load_file(tmp_path / "whole" / "model.safetensors")
        assert written.keys() == wanted.keys() and all(torch.equal(written[name], wanted[name]) for name in wanted)


def test_what_convert_cannot_do_is_said(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in [
        (("--from", "hf", tmp_path / "base", tmp_path / "out", "--merge"), ["--merge", "no adapters"]),
        (("--from", "checkpoint", checkpoint, tmp_path / "out", "--dtype", "bf16"), ["--dtype", "add --merge"]),
    ]:
        assert convert(*arguments) == 2
        message = capsys.readouterr().err
        assert all(text in message for text in named)
    (tmp_path / "base").rename(tmp_path / "moved")
    assert convert("--from", "checkpoint", checkpoint, tmp_path / "out", "--merge") == 2
    assert f"base_model_name_or_path='{tmp_path}/base'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    there = ("--from", "checkpoint", checkpoint, tmp_path / "out", "--merge", "--hf-config", tmp_path / "moved")
    assert convert(*there) == 0


def test_evaluation_reads_the_model_with_its_adapters(checkpoint: Path, tmp_path: Path) -> None:
    actor, base = str(checkpoint / "actor"), str(tmp_path / "base")
    model = find_model(str(checkpoint), "evaluate.checkpoint", "elsewhere")
    assert model == EvaluatedModel("adapter", actor, base)
    assert find_model(base, "evaluate.compare", base) == EvaluatedModel("hf", base, base)
    wanted, weights = merge(checkpoint), open_weights(model)
    assert weights.shapes.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights.read())
    before = weight_sketches(model)
    content = json.loads((checkpoint / "actor" / ADAPTER_CONFIG).read_text())
    (checkpoint / "actor" / ADAPTER_CONFIG).write_text(json.dumps(content | {"lora_alpha": 13}))
    assert weight_sketches(model) != before


def test_what_is_pushed_names_no_path_of_this_machine(checkpoint: Path, tmp_path: Path) -> None:
    card = collect(checkpoint, "org/name", folder := tmp_path / "upload")
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        ADAPTER_CONFIG,
        ADAPTER_WEIGHTS,
        "tokenizer.json",
    ]
    assert json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == "base"
    assert (folder / ADAPTER_WEIGHTS).read_bytes() == (checkpoint / "actor" / ADAPTER_WEIGHTS).read_bytes()
    assert "library_name: peft" in card and "--enable-lora" in card and str(tmp_path) not in card
    saved = checkpoint / "actor" / ADAPTER_CONFIG
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"use_dora": True}))
    seal(checkpoint)
    card = collect(checkpoint, "org/name", tmp_path / "again")
    assert "--enable-lora" not in card and "--from hf --to hf name merged --merge" in card, "vLLM adds no magnitudes"


def test_rules_that_a_function_replaced_are_not_in_the_card(checkpoint: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load((checkpoint / "config.yaml").read_text())
    settings["reward"]["rules"] = [{"name": "math"}]
    for function, expected in ((None, True), ("mine.py:grade", False)):
        settings["reward"]["function"] = function
        (checkpoint / "config.yaml").write_text(yaml.safe_dump(settings))
        seal(checkpoint)
        assert ("reward.rules" in collect(checkpoint, "org/name", tmp_path / str(function))) == expected
