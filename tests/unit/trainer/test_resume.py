"""The checkpoint that a run resumes from, and checkpoints that it rejects."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_mcore.checkpoint import manifest
from rlhf_mcore.checkpoint.commit import prepare, publish, seal, seal_files
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import LATEST, scan
from rlhf_mcore.checkpoint.manifest import DELTA, FULL, Base, CheckpointInfo
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig, Config
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.trainer.inputs import Inputs
from rlhf_mcore.trainer.resume import find_start
from rlhf_mcore.trainer.run_state import Start
from rlhf_mcore_contrib.deltas.write import choose_base, encode
from tests.messages import expect_error
from tests.unit.checkpoint.saving import complete


def save(run: Path, step: int, cfg: Config | None = None, inputs: Inputs | None = None) -> Path:
    """A checkpoint of today, or of the first release, which kept no ``inputs``."""
    disk = Disk()
    partial = prepare(run, step, "0a", disk)
    state = {"format": 1, "step": step, "world_size": 1, "state": {}}
    if inputs is not None:
        state |= {"format": 2, "recent": [], "inputs": inputs}
    files = {
        "trainer_state.json": json.dumps(state),
        "dataloader.json": json.dumps(dict(list(state.items())[:4])),
        "config.yaml": to_yaml(cfg or Config()),
        "weights": f"of {step}",
        "actor/model.safetensors": "weights",
    }
    (partial / "actor").mkdir()
    for name, text in files.items():
        (partial / name).write_text(text)
    paths = [*files, *complete(partial)]
    seal(partial, seal_files(partial, paths, disk), CheckpointInfo(step), disk)
    return publish(run, step, partial, disk)


def save_model(run: Path, step: int, base: Base | None = None) -> Path:
    """A checkpoint with an actor, whole or as a difference."""
    disk = Disk()
    partial = prepare(run, step, "0a", disk)
    (partial / "actor").mkdir()
    save_file({"w": np.full(100, step, np.float32)}, partial / "actor" / "model.safetensors")
    for name in ("trainer_state.json", "dataloader.json"):
        (partial / name).write_text(json.dumps({"format": 1, "step": step, "world_size": 1, "state": {}}))
    (partial / "config.yaml").write_text(to_yaml(Config()))
    names = ("actor/model.safetensors", "trainer_state.json", "dataloader.json", "config.yaml")
    paths = [partial / name for name in names]
    paths += complete(partial)
    if base is not None:
        paths = encode(partial, paths, run / base.name)
    seal(partial, seal_files(partial, paths, disk), CheckpointInfo(step, DELTA if base else FULL, base), disk)
    return publish(run, step, partial, disk)


def start(run: Path, cfg: Config | None = None, **settings: Any) -> Start:
    return find_start(run, CheckpointConfig(**settings), to_yaml(cfg or Config()))


def test_an_empty_directory_begins_at_the_first_step(tmp_path: Path) -> None:
    assert start(tmp_path) == Start()


def test_the_same_command_goes_on_from_the_newest(tmp_path: Path) -> None:
    for step in (2, 10, 4):
        save(tmp_path, step)
    found = start(tmp_path)
    assert (found.checkpoint, found.step, found.continues) == (tmp_path / "checkpoint-10", 10, True)


def test_fault_02_a_broken_link_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).symlink_to("checkpoint-9")
    found = start(tmp_path)
    assert found.step == 3 and (tmp_path / LATEST).readlink() == Path("checkpoint-3")


def test_fault_10_and_11_a_damaged_one_is_named_and_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = save(tmp_path, 3) / "weights"
    path.write_text("Of 3")  # one bit
    (tmp_path / "checkpoint-2" / "weights").write_text("")
    found = start(tmp_path)
    assert found.step == 1
    text = " ".join(found.notes)
    assert "checkpoint-3 is damaged: weights: damaged" in text and "checkpoint-2 is damaged: weights: truncated" in text
    # The run makes these steps again.
    assert [checkpoint.step for checkpoint in scan(tmp_path)] == [1]
    assert (tmp_path / LATEST).readlink() == Path("checkpoint-1")


def test_falling_back_can_be_forbidden(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "weights").write_text("")
    with expect_error(ConfigError, field=("checkpoint-2", "weights"), value="truncated"):
        start(tmp_path, on_damaged="error")
    assert [checkpoint.step for checkpoint in scan(tmp_path)] == [1, 2], "nothing was touched"


def test_when_none_is_intact_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "weights").unlink()
    with pytest.raises(ConfigError, match=r"none of the 1 checkpoints .* is intact.*\n.*weights: missing"):
        start(tmp_path)


def test_verification_can_be_left_to_sizes(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "weights").write_text("Of 1")
    assert start(tmp_path, verify=False).step == 1


def test_never_refuses_to_mix_two_runs(tmp_path: Path) -> None:
    assert start(tmp_path, resume="never") == Start()
    save(tmp_path, 1)
    with expect_error(ConfigError, field="checkpoint.resume", value=("'never'", 1), remedy="choose"):
        start(tmp_path, resume="never")


def test_a_checkpoint_of_another_run_is_where_this_one_begins(tmp_path: Path) -> None:
    other, mine = tmp_path / "other", tmp_path / "mine"
    mine.mkdir()
    save(other, 5)
    save(other, 7)
    path = other / "checkpoint-5"
    found = start(mine, resume=str(path))
    assert (found.checkpoint, found.step, found.continues) == (path, 5, False)
    assert [checkpoint.step for checkpoint in scan(other)] == [5, 7]
    # Killed and started again with the same command, it goes on from its own.
    save(mine, 6)
    again = start(mine, resume=str(path))
    assert (again.checkpoint, again.step, again.continues) == (mine / "checkpoint-6", 6, True)


def test_going_back_to_an_earlier_one_sets_the_later_ones_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    found = start(tmp_path, resume=str(tmp_path / "checkpoint-2"))
    assert (found.step, found.continues) == (2, True)
    assert [checkpoint.step for checkpoint in scan(tmp_path)] == [1, 2]
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_one_that_was_asked_for_and_is_damaged_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "weights").unlink()
    with expect_error(ConfigError, field=("checkpoint-2", "weights"), value="missing"):
        start(tmp_path, resume=str(tmp_path / "checkpoint-2"))


def test_what_has_changed_is_listed_and_what_cannot_change_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    changed = Config()
    changed.trainer.num_steps, changed.actor.layout.tp = 7, 2
    notes = start(tmp_path, changed).notes
    assert "changed since: trainer.num_steps was 100 and is 7" in notes
    assert "changed since: actor.layout.tp was 1 and is 2" in notes
    changed.seed = 5
    with expect_error(ConfigError, field="seed", value=(0, 5), remedy=("restore", "new experiment")):
        start(tmp_path, changed)


def test_files_that_are_not_in_the_manifest_are_named_and_not_loaded(tmp_path: Path) -> None:
    (save_model(tmp_path, 1) / "actor" / "model.safetensors.index.json").write_text("{}")
    found = start(tmp_path)
    assert "not loaded from checkpoint-1: actor/model.safetensors.index.json: not in the manifest" in found.notes
    assert [path.name for path in sorted(found.weights["actor"].iterdir())] == ["config.json", "model.safetensors"]


def test_libraries_of_another_version_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1.2.3")
    manifest.library_versions.cache_clear()
    save(tmp_path, 1)
    assert not any("last digits" in note for note in start(tmp_path).notes)
    monkeypatch.setattr(metadata, "version", lambda name: "1.3" if name == "torch" else "1.2.3")
    manifest.library_versions.cache_clear()
    (note,) = (note for note in start(tmp_path).notes if "last digits" in note)
    assert note.startswith("warning: torch was 1.2.3 and is 1.3: the last digits of numbers may differ")
    manifest.library_versions.cache_clear()


def test_another_kind_of_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "has_gpu", lambda: False)

    def computes_on(kind: str) -> list[str]:
        monkeypatch.setattr(manifest, "processor", lambda: kind)
        manifest.library_versions.cache_clear()
        return [note for note in start(tmp_path).notes if "last digits" in note]

    computes_on("")
    save(tmp_path, 1)
    assert computes_on("AuthenticAMD EPYC avx2") == [], "of an earlier release, which wrote none"
    save(tmp_path, 2)
    assert computes_on("AuthenticAMD EPYC avx2") == []
    (note,) = computes_on("GenuineIntel Xeon avx2 avx512f")
    assert note.startswith(
        "warning: processor was AuthenticAMD EPYC avx2 and is GenuineIntel Xeon avx2 avx512f: the last digits of numbers may differ"
    )
    manifest.library_versions.cache_clear()


def test_a_partial_directory_is_set_aside_and_said(tmp_path: Path) -> None:
    prepare(tmp_path, 4, "0a", Disk())
    found = start(tmp_path)
    assert found.step == 0 and "unfinished .checkpoint-4.partial-0a moved to quarantine" in found.notes[0]


def test_a_delta_is_gone_on_from_as_from_a_whole_one(tmp_path: Path) -> None:
    save_model(tmp_path, 1)
    save_model(tmp_path, 2, choose_base(tmp_path, 5))
    found = start(tmp_path)
    assert found.step == 2 and found.continues
    assert load_file(found.weights["actor"] / "model.safetensors")["w"].tolist() == [2.0] * 100


def test_fault_11_a_damaged_base_takes_its_deltas_along(tmp_path: Path) -> None:
    save_model(tmp_path, 1)
    base = save_model(tmp_path, 2)
    save_model(tmp_path, 3, choose_base(tmp_path, 5))
    (base / "actor" / "model.safetensors").write_bytes(b"damaged")
    found = start(tmp_path)
    assert found.step == 1
    assert found.weights["actor"] == tmp_path / "checkpoint-1" / "actor"
    assert "../checkpoint-2/actor/model.safetensors: truncated" in "".join(found.notes)
    assert [item.step for item in scan(tmp_path)] == [1]  # the others are in quarantine
    with expect_error(ConfigError, field="checkpoint-3", value="damaged", remedy="choose"):
        save_model(tmp_path, 3, Base("checkpoint-1", "another digest"))
        start(tmp_path, on_damaged="error")


def test_a_checkpoint_without_a_manifest_is_named(tmp_path: Path) -> None:
    """A new run in the same directory would overwrite a checkpoint that the user may need."""
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").unlink()
    found = start(tmp_path)
    assert found.step == 1 and "checkpoint-2 is not used: it has no readable manifest.json" in found.notes
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    with expect_error(ConfigError, field=("checkpoint-1", "manifest.json")):
        start(tmp_path)
