"""Convert older formats to the newest one, step by step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.checkpoint import manifest
from rlhf_mcore.checkpoint.layout import TRAINER_STATE
from rlhf_mcore.checkpoint.manifest import read_manifest
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.trainer.run_state import check_counts, read_inputs, read_step
from tests.messages import expect_error

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "checkpoint_v1" / "checkpoint-2"


def test_every_version_has_a_way_to_the_newest() -> None:
    assert sorted(manifest.MIGRATIONS) == list(range(1, manifest.VERSION))


def test_a_checkpoint_of_version_1_is_read_as_one_of_today() -> None:
    manifest = read_manifest(SAMPLE)
    assert (manifest.info.step, manifest.info.kind, manifest.libraries["vllm"]) == (2, "full", "0.32.0")
    assert (read_step(SAMPLE), read_inputs(SAMPLE)) == (2, None)
    check_counts(SAMPLE)


def test_migrations_are_applied_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def third(document: str, content: dict[str, Any]) -> dict[str, Any]:
        assert content["inputs"] is None  # added by the previous step
        return {**content, "document": document}

    monkeypatch.setattr(manifest, "VERSION", 3)
    monkeypatch.setitem(manifest.MIGRATIONS, 2, third)
    found = manifest.migrate(Path("checkpoint-1", TRAINER_STATE), {"step": 1}, 1)
    assert found == {"step": 1, "inputs": None, "recent": [], "document": TRAINER_STATE}
    assert manifest.migrate(Path(TRAINER_STATE), {"inputs": None}, 2)["document"] == TRAINER_STATE
    assert manifest.migrate(Path(TRAINER_STATE), {"step": 1}, 3) == {"step": 1}


@pytest.mark.parametrize("version", [0, 3, -1, 1.0, True, "1", None, [1]])
def test_a_version_of_the_future_or_of_no_release_is_refused(version: object) -> None:
    with expect_error(ConfigError, field="manifest.json", value=(1, 2), remedy="release"):
        manifest.migrate(Path("manifest.json"), {}, version)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("trainer_state.json", '"step": 2', '"step": 3', r"step 2, but trainer_state.json \(step\) records step 3"),
        ("trainer_state.json", '"steps": 2', '"steps": 1', r"trainer_state.json \(counters.steps\) records step 1"),
        ("dataloader.json", '"step": 2', '"step": 1', r"dataloader.json \(step\) records step 1"),
        ("dataloader.json", '"num_drawn": 8', '"num_drawn": 7', "has read 7 prompts, but trainer_state.json counts 8"),
        ("dataloader.json", '"num_drawn": 8', '"num_drawn": 800000000', "has read 800000000 prompts, but"),
        ("dataloader.json", '"num_drawn": 8', f'"num_drawn": {10**30}', "num_drawn.*integer"),
        ("dataloader.json", '"num_drawn": 8', '"num_drawn": -8', "num_drawn=-8, not "),
    ],
)
def test_counts_that_contradict_each_other_are_refused(
    tmp_path: Path, file: str, old: str, new: str, message: str
) -> None:
    checkpoint = shutil.copytree(SAMPLE, tmp_path / "checkpoint-2")
    text = (checkpoint / file).read_text()
    assert text.count(old) == 1
    (checkpoint / file).write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        check_counts(checkpoint)


def test_a_directory_of_another_step_is_refused(tmp_path: Path) -> None:
    renamed = shutil.copytree(SAMPLE, tmp_path / "checkpoint-20")
    with expect_error(ConfigError, field="checkpoint-20", value=("step 2", "step 20")):
        check_counts(renamed)
    check_counts(shutil.copytree(SAMPLE, tmp_path / "kept"))  # a name of the user's own is allowed
