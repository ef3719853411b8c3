"""Read deltas, which the plug-in writes. contrib/deltas/tests tests the plug-in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_mcore.checkpoint.commit import prepare, publish, seal, seal_files
from rlhf_mcore.checkpoint.delta import readable, restore_file, verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import recover
from rlhf_mcore.checkpoint.layout import scan_transitional
from rlhf_mcore.checkpoint.manifest import DELTA, FULL, Base, CheckpointInfo, base_of, files_below
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore_contrib.deltas.write import choose_base, encode
from tests.unit.checkpoint.saving import complete

Weights = dict[str, np.ndarray]


def weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(size=(64, 33)).astype(np.float32),
        "b": rng.normal(size=(128,)).astype(np.float16),
        "c": rng.integers(0, 255, size=(7,), dtype=np.uint8),
        "scalar": np.array(3.0, np.float64),
        "empty": np.zeros((0, 4), np.float32),
    }


def update(before: Weights) -> Weights:
    """Return weights after a small optimizer step."""
    return {name: np.asarray(value * 1.0001, value.dtype) for name, value in before.items()}


def write_model(folder: Path, tensors: Weights, files: int = 1) -> list[Path]:
    """Write weight files with their index, a config and training state, as a rank would write them."""
    (folder / "training").mkdir(parents=True)
    names, shard_of = sorted(tensors), {}
    for k in range(files):
        name = f"model-{k}.safetensors"
        save_file({name: tensors[name] for name in names[k::files]}, folder / name, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(names[k::files], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    (folder / "config.json").write_text("{}")
    save_file({"moments": np.ones(3, np.float32)}, folder / "training" / "moments.safetensors")
    (folder / "training" / "index.json").write_text('{"files": ["moments.safetensors"]}')
    return [path for path in folder.rglob("*") if path.is_file()]


def save(run: Path, step: int, tensors: Weights, base: Base | None = None, files: int = 1) -> Path:
    """Save a full or delta checkpoint."""
    disk = Disk()
    partial = prepare(run, step, "1", disk)
    paths = write_model(partial / "actor", tensors, files)
    (partial / "trainer_state.json").write_text(json.dumps({"step": step}))
    paths += [partial / "trainer_state.json", *complete(partial)]
    if base is not None:
        paths = encode(partial, paths, run / base.name)
    info = CheckpointInfo(step, DELTA if base else FULL, base, {"evaluate/reward": 0.5})
    seal(partial, seal_files(partial, paths, disk), info, disk)
    return publish(run, step, partial, disk)


def saved_bytes(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_below(folder)}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, dict[str, bytes]]:
    """Return a full checkpoint, a delta based on it, and the files of the delta's model as a full checkpoint."""
    run = tmp_path / "run"
    first, second = weights(), update(weights())
    full = save(run, 10, first)
    base = choose_base(run, 10)
    delta = save(run, 20, second, base)
    write_model(tmp_path / "expected", second)
    return full, delta, saved_bytes(tmp_path / "expected")


def test_what_is_read_back_is_the_full_file_bit_for_bit(pair: tuple[Path, Path, dict[str, bytes]]) -> None:
    _, delta, expected = pair
    assert sorted(path.name for path in (delta / "actor").iterdir()) == [
        "config.json",
        "model-0.safetensors.delta",
        "model-0.safetensors.delta.json",
        "model.safetensors.index.json",
        "training",
    ]
    got = saved_bytes(readable(delta))
    assert got == {name: data for name, data in expected.items() if not name.startswith("training/")}
    assert (delta / "actor" / "training" / "moments.safetensors").read_bytes() == expected[
        "training/moments.safetensors"
    ]
    tensors = load_file(readable(delta) / "model-0.safetensors")
    assert all(np.array_equal(tensors[name], value) for name, value in update(weights()).items())


def test_a_full_checkpoint_is_read_where_it_is(pair: tuple[Path, Path, dict[str, bytes]]) -> None:
    full, _, _ = pair
    assert readable(full) == full / "actor"
    assert base_of(full) is None


def test_a_whole_copy_is_made_once_and_cleared_away_by_the_next_start(
    pair: tuple[Path, Path, dict[str, bytes]], tmp_path: Path
) -> None:
    full, delta, _ = pair
    made = readable(delta).stat().st_mtime_ns
    assert readable(delta).stat().st_mtime_ns == made
    assert [item.state for item in scan_transitional(full.parent)] == ["full"]
    recover(full.parent, None, Disk())
    assert scan_transitional(full.parent) == []
    assert readable(delta, scratch=tmp_path / "scratch").parent.parent == tmp_path / "scratch"


def test_tensors_may_be_new_or_gone_or_of_another_shape_or_in_other_files(tmp_path: Path) -> None:
    before = weights()
    save(tmp_path, 10, before, files=3)
    after = update(before)
    after["new"] = after.pop("b")
    after["a"] = np.ones((5, 5), np.float32)
    delta = save(tmp_path, 20, after, choose_base(tmp_path, 10), files=2)
    loaded = {}
    for path in sorted(readable(delta).glob("*.safetensors")):
        loaded |= load_file(path)
    assert loaded.keys() == after.keys()
    assert all(loaded[name].tobytes() == value.tobytes() for name, value in after.items())


def test_a_base_that_is_missing_or_changed_is_named(pair: tuple[Path, Path, dict[str, bytes]], tmp_path: Path) -> None:
    full, delta, _ = pair
    assert verify_chain(delta) == []
    full.rename(tmp_path / "away")
    (problem,) = verify_chain(delta)
    assert problem.is_damage and "checkpoint-20 holds differences to checkpoint-10, which is missing next to it" in str(
        problem
    )
    save(full.parent, 10, weights(1))
    (problem,) = verify_chain(delta)
    assert "which was saved again since" in str(problem)
    with pytest.raises(ConfigError, match="saved again since"):
        readable(delta)


def test_fault_11_damage_of_the_base_is_damage_of_the_delta(pair: tuple[Path, Path, dict[str, bytes]]) -> None:
    full, delta, _ = pair
    weights_file = full / "actor" / "model-0.safetensors"
    data = bytearray(weights_file.read_bytes())
    data[-1] ^= 1
    weights_file.write_bytes(data)
    (problem,) = verify_chain(delta)
    assert (problem.path, problem.kind) == ("../checkpoint-10/actor/model-0.safetensors", "base")
    with pytest.raises(
        ConfigError, match="the restored file differs from the saved file"
    ):  # without verification first
        readable(delta)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../secret", "leads out of"),
        ("actor", "which cannot be read .Is a directory.; the checkpoint is damaged"),
        ("nowhere", "which cannot be read .No such file or directory.; the checkpoint is damaged"),
        ("x" * 3000, "xxx..., which cannot be read .File name too long."),
    ],
)
def test_an_index_names_files_of_the_base(pair: tuple[Path, Path, dict[str, bytes]], name: str, message: str) -> None:
    _, delta, _ = pair
    index = delta / "actor" / "model-0.safetensors.delta.json"
    content = json.loads(index.read_text())
    for tensor in content["tensors"]:
        tensor["base_file"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        readable(delta)


@pytest.mark.parametrize("suffix", [".delta", ".delta.json"])
def test_fault_11_without_verifying_first_damage_of_a_delta_is_a_readable_error_or_none(
    pair: tuple[Path, Path, dict[str, bytes]], suffix: str, tmp_path: Path
) -> None:
    """A bit is flipped anywhere. A read returns the saved file or fails."""
    full, delta, expected = pair
    path = delta / "actor" / f"model-0.safetensors{suffix}"
    data = path.read_bytes()
    refused = 0
    for place in range(0, 8 * len(data), 101):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            restore_file(path.with_name("model-0.safetensors.delta.json"), full, tmp_path / "restored")
            assert (tmp_path / "restored").read_bytes() == expected["model-0.safetensors"]
        except ConfigError:
            refused += 1
    assert refused > 10
