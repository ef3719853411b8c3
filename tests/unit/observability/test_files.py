from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.files import json_line, write_atomically
from rlhf_mcore.own_files import check_output
from tests.messages import expect_error


def test_json_lines_are_strict() -> None:
    record = {"a": float("nan"), "b": [float("inf"), 0.5], "c": "x\ud800y", "d": {1: True}, "e": "é\n"}
    line = json_line(record)
    assert line == '{"a": null, "b": [null, 0.5], "c": "x�y", "d": {"1": true}, "e": "é\\n"}\n'.encode()


def test_values_that_json_does_not_know_are_made_plain() -> None:
    record = {"a": torch.tensor(0.5), "b": np.float32(2), "c": np.array([1, 2]), "d": Decimal("1.5"), "e": (1, None)}
    assert json.loads(json_line(record)) == {"a": 0.5, "b": 2.0, "c": [1, 2], "d": "1.5", "e": [1, None]}


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    """``--out /dev/null`` by root: after a rename the machine would have no /dev/null any more."""
    pipe, link = tmp_path / "pipe", tmp_path / "stdout"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    with expect_error(ConfigError, field="pipe"):
        write_atomically(pipe, b"")
    for path in (pipe, link, tmp_path):
        with expect_error(ConfigError, field="--out", value=path):
            check_output("--out", path)
    assert pipe.is_fifo() and link.is_symlink()
    check_output("--out", tmp_path / "new")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_bytes() == b"old"
