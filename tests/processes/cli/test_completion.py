"""Press TAB in real shells, on real terminals."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Text before TAB, and the completed line.
CASES = [
    ("rlhf-mcore verif", "rlhf-mcore verify-checkpoint "),
    ("rlhf-mcore plan --wor", "rlhf-mcore plan --world-size "),
    ("rlhf-mcore plan --gpu H2", "rlhf-mcore plan --gpu H200 "),
    ("rlhf-mcore train my_r", "rlhf-mcore train my_run.yaml "),
    ("rlhf-mcore train my_run.yaml trainer.num_st", "rlhf-mcore train my_run.yaml trainer.num_steps="),
    ("rlhf-mcore train my_run.yaml logging.console=ri", "rlhf-mcore train my_run.yaml logging.console=rich"),
    ("rlhf-mcore config expl", "rlhf-mcore config explain "),
    ("rlhf-mcore config explain rollout.sampling.temp", "rlhf-mcore config explain rollout.sampling.temperature"),
    ("rlhf-mcore metrics kl/me", "rlhf-mcore metrics kl/mean"),
]


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[int]:
    """Run a program on a separate terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "> "}
    environment |= {"PYTHONPATH": str(ROOT), "HOME": str(folder), "COLUMNS": "300", "HISTFILE": ""}
    with subprocess.Popen(command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs) as shell:
        os.close(theirs)
        try:
            yield ours
        finally:
            shell.kill()
            os.close(ours)


def shown_until(terminal: int, wanted: str, seconds: float = 60) -> str:
    """Return the terminal's output until it contains ``wanted``, or until the time limit."""
    shown, end = "", time.monotonic() + seconds
    while wanted not in shown and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\r", "").replace("\a", "")
    return shown


def folder_with_command(folder: Path) -> Path:
    (folder / "bin").mkdir()
    (folder / "bin" / "rlhf-mcore").write_text(f'#!/bin/sh\nexec {sys.executable} -m rlhf_mcore.cli.main "$@"\n')
    (folder / "bin" / "rlhf-mcore").chmod(0o755)
    (folder / "my_run.yaml").write_text("")
    return folder


def test_tab_in_bash(tmp_path: Path) -> None:
    folder = folder_with_command(tmp_path)
    with terminal(["bash", "--norc", "--noprofile", "-i"], folder) as keyboard:
        setting = "stty cols 300; bind 'set enable-bracketed-paste off'; bind 'set bell-style none'"
        os.write(keyboard, f'{setting}; eval "$(rlhf-mcore completion bash)"; echo rea""dy\n'.encode())
        assert "\nready" in shown_until(keyboard, "\nready")
        for typed, completed in CASES:
            os.write(keyboard, typed.encode() + b"\t")
            assert completed in shown_until(keyboard, completed), typed
            os.write(keyboard, b"\x15")  # clears the line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_is_told_of_the_command(tmp_path: Path) -> None:
    folder = folder_with_command(tmp_path)
    with terminal(["zsh", "-f"], folder) as keyboard:
        os.write(keyboard, b'autoload -U compinit; compinit -u -D; eval "$(rlhf-mcore completion zsh)"; echo rea""dy\n')
        assert "\nready" in shown_until(keyboard, "\nready")
        for typed, completed in CASES[:2]:
            os.write(keyboard, typed.encode() + b"\t")
            assert completed.rstrip() in shown_until(keyboard, completed.rstrip()), typed
            os.write(keyboard, b"\x15")
