"""Check that texts of models, rewards and environments never reach a terminal as a command."""

from __future__ import annotations

import io
import json

import pytest
import rich.console

from rlhf_mcore.cli import preflight, terminal
from rlhf_mcore.cli.terminal import progress_bar, say
from rlhf_mcore.config.errors import ConfigError, for_terminal
from rlhf_mcore.config.schema import Config
from rlhf_mcore.observability.console import Console

# Clear the screen, set a title, colour by the one-byte CSI, overwrite a line, write from right to left, ring the bell.
HOSTILE = "a\x1b[2J\x1b]0;owned\x07b\x9b31mc\rd\u202ee\x08\x00\ud800é😀中"
SHOWN = r"a\x1b[2J\x1b]0;owned\x07b\x9b31mc\rd\u202ee\x08\x00\ud800é😀中"


def test_control_characters_are_shown_and_lines_stay() -> None:
    assert for_terminal(HOSTILE) == SHOWN
    assert for_terminal("a\n\tb  c") == "a\n\tb  c"


def test_every_way_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    terminal.report(ConfigError(f"the reward raised {HOSTILE}"))
    terminal.report(RuntimeError(HOSTILE))
    terminal.report_of_tool(OSError(5, HOSTILE, HOSTILE))
    preflight.say(Config(), HOSTILE)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert SHOWN in text and for_terminal(text) == text
    assert shown.err.count(SHOWN) >= 3


def test_an_error_is_escaped_where_python_prints_it() -> None:
    assert str(ConfigError(HOSTILE)) == SHOWN
    assert str(ConfigError.many([HOSTILE, HOSTILE])).count(SHOWN) == 2


@pytest.mark.parametrize("mode", ["plain", "rich", "json"])
def test_every_way_of_a_run(mode: str) -> None:
    """The output is not a terminal, so Rich writes no escapes."""
    written = io.StringIO()
    output = rich.console.Console(file=written, width=200, height=60, force_terminal=False)
    with Console(mode, 3, HOSTILE, output=output) as console:
        console.sample(1, HOSTILE, HOSTILE, 1.0)
        console.note(f"step 1: 1 of 8 responses got no score; the first: {HOSTILE}")
        console.warning(1, HOSTILE)
        console.step(1, {"reward/mean": 1.0})
        if console.display is not None:
            output.print(console.display.render())
        console.summary("result", [("a", HOSTILE)], ("", "before"), [HOSTILE])
    text = written.getvalue().replace("\r", "") if mode == "rich" else written.getvalue()
    assert for_terminal(text) == text
    if mode == "json":
        lines = [line for line in text.splitlines() if line.startswith("{")]
        assert json.loads(lines[0])["note"].endswith(HOSTILE.replace("\ud800", "\ufffd"))
    else:
        assert SHOWN[:30] in text


def test_a_terminal_gets_no_escape_of_theirs() -> None:
    written = io.StringIO()
    output = rich.console.Console(file=written, width=200, height=60, force_terminal=True, color_system=None)
    with Console("rich", 3, HOSTILE, output=output) as console:
        console.note(HOSTILE)
        console.sample(1, HOSTILE, HOSTILE, 1.0)
        console.step(1, {"reward/mean": 1.0})
        console.summary("result", [("a", HOSTILE)], ("", "before"), [HOSTILE])
    text = written.getvalue()
    for theirs in ("\x1b[2J", "\x1b]0;", "\x9b", "\x07", "\u202e", "\x08", "\ud800"):
        assert theirs not in text


def test_a_progress_bar_shows_any_name_and_counts() -> None:
    output = rich.console.Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with progress_bar(output, "{name}\x9b31m", 3, "prompts") as advance:
        advance(3)
    text = output.file.getvalue()  # type: ignore[attr-defined]
    assert r"{name}\x9b31m" in text and "3/3 prompts" in text
