"""Runs whose disk has no byte left: one message that names it, wherever they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import environment, run_command
from tests.small_disk import small_disk
from tests.tiny_training import CONFIG, SMALL, make_quickstart

REWARD = """
from contextlib import suppress
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    disk = Path({disk!r})
    metrics = disk / "quickstart" / "full" / "metrics.jsonl"
    if metrics.exists() and "loss/total" in metrics.read_text():  # the first step is done
        with suppress(OSError), (disk / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    return (sum(map(ord, solution_str)) % 17) / 16
"""
TRAINING = [*SMALL, "checkpoint.save_steps=100", "experiment=full"]
PARTS = "-m", "rlhf_mcore.cli.main", "train", CONFIG


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("full-disk")
    make_quickstart(directory)
    (directory / "disk").mkdir()
    (directory / "reward.py").write_text(REWARD.format(disk=str(directory / "disk")))
    return directory


@pytest.fixture
def disk(workspace: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with small_disk(workspace / "disk", getattr(request, "param", 8192)) as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        yield workspace / "disk"


def train(workspace: Path, *arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *PARTS, *TRAINING, "output_dir=disk", *arguments]
    return run_command(["bash", "-c", f'exec "$@" {shell}', "train", *command], workspace, environment(workspace))


def assert_one_message(done: subprocess.CompletedProcess[str], file: str) -> None:
    """At most two lines: the error with the file and the free bytes, and whose it is."""
    assert done.returncode in (1, 2), done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stderr.splitlines()
    assert len(lines) <= 2, done.stderr
    assert re.search(rf"^error: .*No space left on device: \S*/{file} needs [\d,]+ bytes, 0 bytes are free", lines[0])
    assert lines[0].count("bytes are free") == 1


def test_fault_37_a_disk_that_fills_between_two_steps(workspace: Path, disk: Path) -> None:
    assert_one_message(train(workspace, "logging.rollouts_every=1"), r"rollouts/step-000002\.jsonl")
    assert list(disk.rglob("stderr.log")) and not list(disk.rglob("error.json"))  # torchrun reads no half of one


def test_fault_37_output_on_the_full_disk_itself(workspace: Path, disk: Path) -> None:
    settings = ["logging.rollouts_every=0", "logging.trackers=[tensorboard]"]
    assert_one_message(train(workspace, *settings, shell="> disk/output.txt"), r"metrics\.jsonl")


@pytest.mark.parametrize(
    "disk, file",
    [(4, r"launch\.json"), (12, r"config\.yaml"), (20, r"metrics\.jsonl")],
    indirect=["disk"],
)
def test_fault_37_a_start_on_a_disk_of_a_few_kib(workspace: Path, disk: Path, file: str) -> None:
    assert_one_message(train(workspace), file)
