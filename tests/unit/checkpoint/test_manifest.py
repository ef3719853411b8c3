from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
import xxhash

import rlhf_mcore
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.manifest import (
    Base,
    CheckpointInfo,
    Problem,
    hash_file,
    hash_files,
    read_manifest,
    verify,
    write_manifest,
)
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.machine import has_gpu, processor
from tests.unit.checkpoint.saving import contents, save


def kinds(problems: list[Problem]) -> list[tuple[str, str]]:
    return [(problem.path, problem.kind) for problem in problems]


def test_every_file_is_there_with_its_size_and_hash(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 20, metrics={"evaluate/accuracy": 0.5, "evaluate/reward": float("nan")})
    content = json.loads((checkpoint / "manifest.json").read_text())
    assert content["format"] == "rlhf_mcore.checkpoint" and content["version"] == 2
    assert (content["step"], content["kind"], content["base"]) == (20, "full", None)
    assert content["metrics"] == {"evaluate/accuracy": 0.5}
    assert content["files"] == {
        name: {"size": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
        for name, data in sorted(contents(20).items())
    }
    assert content["libraries"]["rlhf_mcore"] == rlhf_mcore.__version__
    assert content["libraries"]["torch"] == version("torch")
    computed_on = {"processor"} if processor() and not has_gpu() else set()
    names = {"rlhf_mcore", "torch", "megatron-core", "vllm", "transformers"}
    assert content["libraries"].keys() == names | computed_on
    assert verify(checkpoint) == []


def test_what_is_written_is_read(tmp_path: Path) -> None:
    info = CheckpointInfo(7, "delta", Base("checkpoint-5", "ab"), {"evaluate/reward": 0.25})
    digest = write_manifest(tmp_path, {"a/b": {"size": 1, "xxh3_128": "00"}}, info, Disk())
    manifest = read_manifest(tmp_path)
    assert manifest.info == info and manifest.digest == digest
    assert (manifest.files["a/b"].size, manifest.files["a/b"].xxh3_128) == (1, "00")


def test_the_same_content_gives_the_same_manifest(tmp_path: Path) -> None:
    first, second = save(tmp_path / "1", 20), save(tmp_path / "2", 20)
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()


@pytest.mark.parametrize("size", [0, 1, 4 * 2**20, 9 * 2**20 + 5])
def test_hashes_are_those_of_the_whole_content(size: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    entry = hash_file(tmp_path / "file")
    assert (entry.size, entry.xxh3_128) == (size, xxhash.xxh3_128_hexdigest(data))


def test_ranks_hash_their_own_files_and_the_parts_add_up(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/x", "a/y", "z"):
        (tmp_path / name).write_text(name)
    parts = hash_files(tmp_path, ["a/x", tmp_path / "z"]) | hash_files(tmp_path, [Path("a/y")])
    assert json.loads(json.dumps(parts)) == hash_files(tmp_path, ["z", "a/y", "a/x"])
    with pytest.raises(AssertionError, match="not below"):
        hash_files(tmp_path, ["../z"])


def test_fault_10_a_truncated_file_is_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 20)
    shard = checkpoint / "actor" / "model.safetensors"
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    (problem,) = verify(checkpoint, hashes=False)
    assert str(problem) == f"actor/model.safetensors: truncated: {size - 1} bytes, the manifest has {size}"
    with shard.open("ab") as file:
        file.write(b"ab")
    (problem,) = verify(checkpoint)
    assert f"too long: {size + 1} bytes" in problem.detail


@pytest.mark.parametrize("name", [*contents(20), "manifest.json"])
def test_fault_11_a_flipped_bit_is_seen_wherever_it_is(name: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 20)
    path = checkpoint / name
    data = path.read_bytes()
    places = range(8 * len(data)) if name == "manifest.json" else (0, 4 * len(data), 8 * len(data) - 1)
    for place in places if len(data) < 400 else (*places[:64], *places[64::53], places[-1]):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        (problem,) = verify(checkpoint)
        assert (problem.path, problem.kind) == (name, "manifest" if name == "manifest.json" else "hash"), place
        assert problem.is_damage
    path.write_bytes(data)
    assert verify(checkpoint) == []


def test_missing_and_extra_files_are_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 20)
    (checkpoint / "actor" / "config.json").unlink()
    (checkpoint / "actor" / "notes.txt").write_text("mine")
    problems = verify(checkpoint)
    assert kinds(problems) == [("actor/config.json", "missing"), ("actor/notes.txt", "extra")]
    assert [problem.is_damage for problem in problems] == [True, False]


def test_files_that_lead_out_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 20)
    weights = checkpoint / "actor" / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert kinds(verify(checkpoint)) == [("actor/model.safetensors", "outside")]
    folder = tmp_path / "crafted"
    folder.mkdir()
    (tmp_path / "secret").write_text("s")
    entry = hash_files(tmp_path, ["secret"])["secret"]
    write_manifest(folder, {"../secret": entry, str(tmp_path / "secret"): entry}, CheckpointInfo(1), Disk())
    assert {problem.kind for problem in verify(folder)} == {"outside"}


@pytest.mark.parametrize(
    "text, message",
    [
        (None, r"manifest\.json: no such file"),
        ("", "not valid JSON"),
        ("[" * 100_000, "nested deeper than 32"),
        ("[]", "not a JSON object"),
        ('{"format": "other"}', "not the manifest of a checkpoint"),
        (
            '{"format": "rlhf_mcore.checkpoint", "version": 3}',
            "format version 3, but this release reads versions 1 to 2",
        ),
        ('{"format": "rlhf_mcore.checkpoint", "version": "1"}', "format version '1', but this release"),
        ('{"format": "rlhf_mcore.checkpoint", "version": 2}', "damaged"),
        ('{"format": "rlhf_mcore.checkpoint", "version": 1}', "damaged"),
    ],
)
def test_a_manifest_that_is_none_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_manifest(tmp_path)
    (problem,) = verify(tmp_path)
    assert problem.kind == "manifest"
