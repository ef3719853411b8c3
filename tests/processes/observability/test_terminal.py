"""Run the same program with the display on a real terminal and in a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from rlhf_mcore.observability.figures import explain_labels, step_line

METRICS = {
    "reward/mean": 0.25,
    "kl/mean": 0.01,
    "actor/entropy": 1.5,
    "rollout/response_length_mean": 40.0,
    "timing/generate_s": 6.0,
    "timing/update_s": 3.0,
    "timing/sync_s": 1.0,
    "timing/step_s": 10.0,
    "timing/tokens_per_s": 1234.0,
    "throughput/mfu": 0.41,
    "memory/update_allocated_bytes": 3 * 2.0**30,
    "memory/update_outside_bytes": 1.5 * 2.0**30,
}
SHOW = f"""
import sys, time
from rlhf_mcore.observability.console import Console
with Console(sys.argv[1], 20, "math / first") as console:
    console.note("engines are up")
    for step in (1, 2):
        console.phase("generate")
        console.progress("34 finished · 30 waiting · longest 512 tokens")
        console.sample(step, "What is 2+2?", "It is \\x1b]0;stolen title\\x07\\x1b[2J4.\\nDone", 1.0)
        console.warning(3, "warning: the disk is \\x1b[31mslow")
        console.warning(3, "warning: the disk is \\x1b[31mslow")
        time.sleep(0.4)  # the display is drawn four times a second
        console.step(step, {{**{METRICS!r}, "reward/mean": 0.25 * step}})
    console.phase("save")
    time.sleep(0.4)
    console.summary("result", [("accuracy", "0.31", "0.74")], ("", "before", "after"), ["run directory  outputs/math"])
"""


def on_a_terminal(mode: str, directory: Path) -> str:
    """Return the program's output to a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        environment.pop(name, None)
    with subprocess.Popen(
        [sys.executable, "-c", SHOW, mode], stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory, env=environment
    ) as process:
        os.close(theirs)
        written, is_asked = b"", False
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            written += data
            if not is_asked and "╯".encode() in written:
                is_asked = os.write(ours, b"\x03") > 0  # the terminal echoes it; it is not a controlling terminal
        assert process.wait(60) == 0, written.decode(errors="replace")
    os.close(ours)
    return written.decode()


def test_a_terminal_shows_all_of_it_and_gets_no_command_of_the_models(tmp_path: Path) -> None:
    written = on_a_terminal("auto", tmp_path)
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # the cursor is visible again
    assert (
        "^C" in written and "╯^C" not in written
    )  # after a full line it would wrap, and frames would be one line too low
    assert "\x1b]0;" not in written and "\x1b[2J" not in written and "\x07" not in written
    # The terminal may echo the key in the middle of a line.
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\^C", "", written).replace("\r", "\n")
    for expected in (
        "engines are up",
        "34 finished · 30 waiting · longest 512 tokens",
        "generate 60%  update 30%  sync 10%",
        "1,234 tokens/s · mfu 41 % · memory 3.0 GiB · 1.5 GiB outside torch",
        "left 0:03:00 · 10.0 s/step",
        "0.250 → 0.500",
        "sample of step 2, reward 1",
        "[2J4. Done",
        "step 2/20",
        "run directory  outputs/math",
    ):
        assert expected in text, text[-6000:]
    assert (
        re.search(r"reward  +▁█", text)
        and re.search(r"kl +▅▅", text)
        and re.search(r"entropy +▅▅ +1\.50 → 1\.50", text)
    )
    assert text.count("rank 3: warning: the disk is  [31mslow") == 1
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("mode", ["auto", "off", "json"])
def test_a_pipe_gets_lines_nothing_or_objects(mode: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SHOW, mode], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    if mode == "off":
        assert lines == []
    elif mode == "auto":
        steps = [step_line(step, 20, {**METRICS, "reward/mean": 0.25 * step}) for step in (1, 2)]
        assert lines[:4] == ["engines are up", explain_labels(METRICS), *steps]
        assert "\x1b" not in done.stdout and "sample" not in done.stdout
    else:
        note, first, second, summary = map(json.loads, lines)
        assert note == {"note": "engines are up"} and first == {"step": 1, **METRICS}
        assert second["reward/mean"] == 0.5 and summary["rows"] == [["accuracy", "0.31", "0.74"]]
