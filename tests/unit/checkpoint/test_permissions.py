"""Test ``checkpoint.mode``, the read permissions of checkpoints."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.collective import CheckpointWriter
from rlhf_mcore.checkpoint.commit import Permissions
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, verify

pytestmark = pytest.mark.usefixtures("world")

WEIGHTS, MOMENTS = "actor/model.safetensors", "actor/training/state-00000.safetensors"
STATE, CONFIG, MANIFEST = "trainer_state.json", "config.yaml", "manifest.json"
FILES = (WEIGHTS, MOMENTS, STATE, CONFIG, MANIFEST)
FOLDERS = (".", "actor", "actor/training")


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def save(run: Path, setting: str | None) -> Path:
    def write(partial: Path) -> list[Path]:
        assert mode(partial) == (0o755 if setting is None else 0o700)  # other users cannot read it while it is written
        for name in FILES[:-1]:
            (partial / name).parent.mkdir(exist_ok=True, parents=True)
            (partial / name).write_text(name)
        return [partial / name for name in FILES[:-1]]

    return CheckpointWriter(run, permissions=Permissions(setting)).save(CheckpointInfo(10), write)


@pytest.mark.parametrize(
    ("setting", "files", "folders"),
    [
        (None, (0o644, 0o644, 0o644, 0o644, 0o644), (0o755, 0o755, 0o755)),
        ("private", (0o644, 0o600, 0o600, 0o600, 0o644), (0o755, 0o755, 0o700)),
        ("0600", (0o600,) * 5, (0o700,) * 3),
        ("0640", (0o640,) * 5, (0o750,) * 3),
        ("416", (0o640,) * 5, (0o750,) * 3),  # YAML reads unquoted 0640 as this number
    ],
)
def test_the_modes_of_files_and_directories(
    tmp_path: Path, setting: str | None, files: tuple[int, ...], folders: tuple[int, ...]
) -> None:
    tmp_path.chmod(0o755)
    checkpoint = save(tmp_path, setting)
    assert verify(checkpoint) == []
    assert {name: mode(checkpoint / name) for name in FILES} == dict(zip(FILES, files, strict=True))
    assert {name: mode(checkpoint / name) for name in FOLDERS} == dict(zip(FOLDERS, folders, strict=True))
