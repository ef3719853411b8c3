"""The commit protocol of a world, in a world of one. Two ranks are in tests/distributed."""

from __future__ import annotations

import errno
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_mcore.checkpoint.collective import CheckpointWriter, TransientSaveError, decide_together
from rlhf_mcore.checkpoint.delta import readable, verify_chain
from rlhf_mcore.checkpoint.disk import Disk, SaveError
from rlhf_mcore.checkpoint.housekeeping import Retention, best_rule, tidy
from rlhf_mcore.checkpoint.layout import linked_step, scan, scan_transitional
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, read_manifest
from rlhf_mcore.checkpoint.triggers import SignalRequests, Triggers
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore_contrib.archive.archiver import Archiver
from rlhf_mcore_contrib.deltas import write as write_deltas
from tests.unit.checkpoint.saving import FailingDisk, complete
from tests.unit.parallel.world import world

__all__ = ["world"]
pytestmark = pytest.mark.usefixtures("world")


def write(partial: Path, value: float = 1.0) -> list[Path]:
    (partial / "actor").mkdir()
    path = partial / "actor" / "model.safetensors"
    save_file({"w": np.full(1000, value, np.float32)}, path)
    return [path, *complete(partial)]


def test_a_save_and_what_the_manifest_says_of_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    info = writer.next_info(10, {"evaluate/reward": 0.5})
    assert info == CheckpointInfo(10, metrics={"evaluate/reward": 0.5})
    path = writer.save(info, write)
    assert path == tmp_path / "checkpoint-10"
    assert read_manifest(path).info == info
    assert linked_step(tmp_path, "latest") == 10


def test_deltas_between_full_saves_are_read_back_and_outlive_retention(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, deltas=write_deltas, full_every=3)
    kinds = []
    for step in range(1, 6):
        info = writer.next_info(step, {})
        path = writer.save(info, lambda partial, step=step: write(partial, step))  # type: ignore[misc]
        tidy(tmp_path, Retention(limit=1), None, Disk())
        assert verify_chain(path) == []
        assert (
            load_file(readable(path, scratch=tmp_path / "scratch") / "model.safetensors")["w"].tolist() == [step] * 1000
        )
        kinds.append(info.base.name if info.base else "full")
    assert kinds == ["full", "checkpoint-1", "checkpoint-1", "full", "checkpoint-4"]
    assert [checkpoint.step for checkpoint in scan(tmp_path)] == [4, 5]


def test_what_failed_is_raised_and_removed(tmp_path: Path) -> None:
    def fail(partial: Path) -> list[Path]:
        write(partial)
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    writer = CheckpointWriter(tmp_path)
    writer.save(CheckpointInfo(10), write)
    with pytest.raises(
        SaveError, match=r"checkpoint-20 was not saved: rank 0: \[Errno 28\].*Earlier checkpoints are unt"
    ):
        writer.save(CheckpointInfo(20), fail)
    assert scan_transitional(tmp_path) == []
    assert linked_step(tmp_path, "latest") == 10


@pytest.mark.parametrize("failures, attempts", [(1, 2), (2, 3), (9, 3)])
def test_fault_12_a_file_that_could_not_be_made_durable_is_written_again(
    failures: int, attempts: int, tmp_path: Path
) -> None:
    made: list[Path] = []

    def count_and_write(partial: Path) -> list[Path]:
        made.append(partial)
        return write(partial)

    disk = FailingDisk(errno.EIO, lambda name, path: path.name == "model.safetensors" and len(made) <= failures)
    writer = CheckpointWriter(tmp_path, disk)
    if failures < 3:
        writer.save(CheckpointInfo(10), count_and_write)
    else:
        with pytest.raises(TransientSaveError, match="Input/output error"):
            writer.save(CheckpointInfo(10), count_and_write)
    assert len(set(made)) == len(made) == attempts  # each in a directory of its own
    assert [checkpoint.step for checkpoint in scan(tmp_path)] == ([10] if failures < 3 else [])


# Half of all combinations contains every combination of four switches.
SWITCHES = [on for on in itertools.product([False, True], repeat=5) if sum(on) % 2 == 0]


@pytest.mark.parametrize(("background", "delta", "archive", "keeps", "has_metric"), SWITCHES)
def test_fault_07_the_link_moves_whatever_is_switched_on(
    tmp_path: Path, background: bool, delta: bool, archive: bool, keeps: bool, has_metric: bool
) -> None:
    keep_every, metric = 2 if keeps else None, "evaluate/reward" if has_metric else None
    config = CheckpointConfig(save_steps=1, metric_for_best_model=metric, save_total_limit=1, keep_every=keep_every)
    triggers = Triggers(config, 4, tmp_path)
    triggers.begin()
    writer = CheckpointWriter(tmp_path, deltas=write_deltas if delta else None, full_every=2)
    archiver = Archiver(tmp_path) if archive else None
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.4)):
        metrics = {"evaluate/reward": reward}
        decision = decide_together(triggers, SignalRequests(), step, metrics)
        assert decision.save and decision.best == (metric is not None and step <= 2)
        info = writer.next_info(step, metrics)
        if background:
            partial = writer.begin(step)
            with ThreadPoolExecutor(1) as thread:
                entries, error = thread.submit(writer.attempt, partial, write, info.base).result()
            assert linked_step(tmp_path, "latest") == (step - 1 or None)
            writer.finish(info, partial, entries, error)
        else:
            writer.save(info, write)
        triggers.record_save(step, 0.1)
        notes = tidy(tmp_path, Retention(1, keep_every), best_rule(triggers.config), Disk(), archiver)
        assert not any("could not" in note for note in notes)
        assert linked_step(tmp_path, "latest") == step
        assert verify_chain(tmp_path / "latest") == []
    if archiver is not None:
        archiver.close()
    kept = {4} | ({2} if keep_every or metric else set())  # the best, and every second
    kept |= {step - 1 for step in kept if delta}  # their bases
    assert [checkpoint.step for checkpoint in scan(tmp_path)] == sorted(kept)
    assert linked_step(tmp_path, "best") == (2 if metric else None)
    archived = {int(path.name.split("-")[1].split(".")[0]) for path in (tmp_path / "archive").glob("*.zst")}
    assert archived == ({1, 2, 3} - kept if archive else set())
