"""The script is the command."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "convert_checkpoint.py"


def test_the_script_ends_with_the_commands_exit_code_and_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", "--from", "hf", "--to", "hf", str(tmp_path), "out"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no config.json; name the directory")
