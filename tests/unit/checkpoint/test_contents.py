"""Test the files that a manifest must name. Other files are never read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
import yaml
from safetensors.numpy import load_file

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.checkpoint.delta import readable, verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import recover
from rlhf_mcore.checkpoint.manifest import hash_file, read_manifest, write_manifest
from rlhf_mcore.commands.evaluate.evaluation import checked_folder
from rlhf_mcore.config.errors import ConfigError

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "checkpoint_v1" / "checkpoint-2"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(SAMPLE, tmp_path / "run" / "checkpoint-2")


def rewrite(checkpoint: Path, *without: str) -> None:
    """Write a well-formed manifest that omits some files."""
    manifest = read_manifest(checkpoint)
    files = {
        name: {"size": entry.size, "xxh3_128": entry.xxh3_128}
        for name, entry in manifest.files.items()
        if not any(name == left or (left.endswith("/") and name.startswith(left)) for left in without)
    }
    write_manifest(checkpoint, files, manifest.info, Disk())


def damage(checkpoint: Path) -> list[str]:
    return [str(problem) for problem in verify_chain(checkpoint) if problem.is_damage]


def add_index(checkpoint: Path) -> None:
    """Add another model's weights, and an index that leads a reader to them."""
    tensors = load_file(checkpoint / "actor" / "model.safetensors")
    shutil.copy(checkpoint / "critic" / "model.safetensors", checkpoint / "actor" / "other.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "other.safetensors")}
    (checkpoint / "actor" / "model.safetensors.index.json").write_text(json.dumps(index))


def test_what_an_earlier_release_has_written_names_all_that_is_needed(checkpoint: Path) -> None:
    assert verify_chain(checkpoint) == []


def test_an_index_that_is_not_in_the_manifest_is_named_and_not_read(checkpoint: Path) -> None:
    expected = load_file(checkpoint / "actor" / "model.safetensors")
    add_index(checkpoint)
    (checkpoint / "actor" / "tokenizer.model").write_bytes(b"another tokenizer")
    (checkpoint / "actor" / "training" / "notes.txt").write_text("mine")
    problems = verify_chain(checkpoint)
    assert [(problem.path, problem.kind) for problem in problems] == [
        ("actor/model.safetensors.index.json", "extra"),
        ("actor/other.safetensors", "extra"),
        ("actor/tokenizer.model", "extra"),
        ("actor/training/notes.txt", "extra"),
    ]
    folder = readable(checkpoint)
    named = [name.removeprefix("actor/") for name in read_manifest(checkpoint).files if name.startswith("actor/")]
    assert {path.name for path in folder.iterdir()} == {name for name in named if "/" not in name}
    reader = HFReader(folder)
    assert {name: reader.shard(name) for name in reader.names} == dict.fromkeys(expected, "model.safetensors")
    assert all((tensor.numpy() == expected[name]).all() for name, tensor in reader.tensors())
    recover(checkpoint.parent, None, Disk())
    assert not folder.exists() and (checkpoint / "actor" / "other.safetensors").exists()


def test_without_further_files_a_model_is_read_where_it_is(checkpoint: Path) -> None:
    assert readable(checkpoint, "critic") == checkpoint / "critic"
    add_index(checkpoint)
    assert readable(checkpoint, "critic") == checkpoint / "critic"
    with pytest.raises(ConfigError, match="names no model 'reference', only: actor, critic"):
        readable(checkpoint, "reference")


@pytest.mark.parametrize(
    "left_out",
    [
        "trainer_state.json",
        "dataloader.json",
        "config.yaml",
        "rng.safetensors",
        "actor/config.json",
        "actor/model.safetensors",
        "critic/training/index.json",
        "critic/training/state-00000.safetensors",
    ],
)
def test_a_manifest_that_leaves_something_out_is_refused(checkpoint: Path, left_out: str) -> None:
    rewrite(checkpoint, left_out)
    (problem,) = damage(checkpoint)
    assert problem.startswith(f"{left_out}: the manifest does not name it")


def test_a_manifest_of_nothing_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, *read_manifest(checkpoint).files)
    assert "manifest.json: the manifest names no model" in damage(checkpoint)
    rewrite(checkpoint, "actor/", "critic/")
    shutil.rmtree(checkpoint)
    shutil.copytree(SAMPLE, checkpoint)
    rewrite(checkpoint, "actor/", "critic/")
    assert damage(checkpoint) == ["manifest.json: the manifest names no model"]


def test_every_shard_of_an_index_has_to_be_named(checkpoint: Path) -> None:
    add_index(checkpoint)
    files = {name: vars_of(checkpoint, name) for name in read_manifest(checkpoint).files}
    index = "actor/model.safetensors.index.json"
    write_manifest(checkpoint, {**files, index: vars_of(checkpoint, index)}, read_manifest(checkpoint).info, Disk())
    assert damage(checkpoint) == ["actor/other.safetensors: the manifest does not name it, but actor requires it"]


def vars_of(checkpoint: Path, name: str) -> dict[str, object]:
    entry = hash_file(checkpoint / name)
    return {"size": entry.size, "xxh3_128": entry.xxh3_128}


def test_evaluate_reads_what_the_manifest_names_and_says_what_it_leaves(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked_folder(checkpoint / "actor", hashes=True) == str(checkpoint / "actor")
    assert checked_folder(SAMPLE.parent / "model", hashes=True) == str(SAMPLE.parent / "model")  # not a checkpoint
    add_index(checkpoint)
    folder = Path(checked_folder(checkpoint / "actor", hashes=True))
    assert not (folder / "model.safetensors.index.json").exists()
    names = "actor/model.safetensors.index.json, actor/other.safetensors"
    assert capsys.readouterr().err == f"{checkpoint}: not in the manifest, so not loaded: {names}\n"


@pytest.mark.parametrize("name", ["actor/model.safetensors", "actor/tokenizer.json", "actor/config.json"])
def test_fault_11_evaluate_compares_the_hashes_of_the_model(checkpoint: Path, name: str) -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[-3] ^= 1
    (checkpoint / name).write_bytes(data)
    with pytest.raises(ConfigError, match=f"is damaged .{name}: damaged: its content differs"):
        checked_folder(checkpoint / "actor", hashes=True)
    assert checked_folder(checkpoint / "critic", hashes=True) == str(checkpoint / "critic")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("replace", [_fifo, lambda path: (path.unlink(), path.symlink_to("/dev/zero"))])
@pytest.mark.parametrize("name", ["manifest.json", "actor/config.json"])
def test_what_is_no_regular_file_is_not_waited_for(
    checkpoint: Path, name: str, replace: Callable[[Path], object]
) -> None:
    replace(checkpoint / name)
    (problem,) = damage(checkpoint)
    assert problem.startswith(name) and ("not a regular file" in problem or "leads out of" in problem)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", "2", "has step='2', not an integer"),
        ("step", -1, "has step=-1, not "),
        ("kind", "half", "has kind='half', not one of full, delta"),
        ("base", [], r"has base=\[\], not an object"),
        ("files", None, "has no files, which is an object"),
        ("files", {"a": {"size": "12", "xxh3_128": ""}}, "has files.a.size='12', not an integer"),
        ("files", {"a": 3}, "has files.a=3, not an object"),
        ("metrics", {"evaluate/reward": "high"}, "not a number"),
        ("libraries", {"torch": 2}, "has libraries.torch=2, not a text"),
    ],
)
def test_a_manifest_with_a_value_of_another_kind_is_refused(
    checkpoint: Path, key: str, value: object, message: str
) -> None:
    content = json.loads((checkpoint / "manifest.json").read_text())
    content.pop("digest")
    content[key] = value
    content["digest"] = xxhash.xxh3_128_hexdigest((json.dumps(content, indent=1) + "\n").encode())
    (checkpoint / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_manifest(checkpoint)


@pytest.mark.parametrize("kl_coef", [0.01, 0.0])
def test_models_that_the_run_has_must_be_named(checkpoint: Path, kl_coef: float) -> None:
    rewrite(checkpoint, "critic/")
    assert damage(checkpoint) == ["critic: the manifest does not name it, but config.yaml requires it"]
    settings = yaml.safe_load((checkpoint / "config.yaml").read_text())
    settings["reference"]["refresh_steps"] = 5
    settings["algorithm"]["kl"]["coef"] = kl_coef  # 0: no reference
    settings["algorithm"]["use_critic"] = "false"
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(settings))
    files = {name: vars_of(checkpoint, name) for name in read_manifest(checkpoint).files}
    write_manifest(checkpoint, files, read_manifest(checkpoint).info, Disk())
    expected = ["reference: the manifest does not name it, but config.yaml requires it"] if kl_coef else []
    assert damage(checkpoint) == expected
