"""Files that a delta save writes. tests/unit/checkpoint/test_delta.py tests reading them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_mcore.checkpoint.delta import readable
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import Retention, prune
from rlhf_mcore_contrib.deltas.write import choose_base, is_weight_file
from tests.unit.checkpoint.test_delta import save, update, weights


def test_long_tensors_are_cut_into_chunks_that_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_mcore.checkpoint.delta.CHUNK_BYTES", 1024)
    before = weights()
    save(tmp_path, 10, before)
    delta = save(tmp_path, 20, update(before), choose_base(tmp_path, 10))
    loaded = load_file(readable(delta) / "model-0.safetensors")
    assert all(loaded[name].tobytes() == value.tobytes() for name, value in update(before).items())


def test_unchanged_weights_take_next_to_nothing(tmp_path: Path) -> None:
    same = {"w": np.random.default_rng(0).normal(size=2**18).astype(np.float32)}
    save(tmp_path, 10, same)
    delta = save(tmp_path, 20, same, choose_base(tmp_path, 10))
    assert (delta / "actor" / "model-0.safetensors.delta").stat().st_size < 2**20 / 1000


@pytest.mark.parametrize("limit", [None, 1])
def test_every_so_many_saves_is_a_full_one_whatever_retention_removes(tmp_path: Path, limit: int | None) -> None:
    kinds = []
    for step in range(1, 8):
        base = choose_base(tmp_path, 3)
        save(tmp_path, step, weights(step), base)
        prune(tmp_path, Retention(limit), Disk())
        kinds.append(base.name if base else "full")
    one, four = "checkpoint-1", "checkpoint-4"
    assert kinds == ["full", one, one, "full", four, four, "full"]
    assert choose_base(tmp_path, 1) is None


def test_training_state_and_other_files_are_not_weights() -> None:
    names = ["actor/model.safetensors", "critic/model-1.safetensors", "actor/training/m.safetensors", "rng.safetensors"]
    assert [is_weight_file(name) for name in names] == [True, True, False, False]
