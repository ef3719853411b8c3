"""A conversation's turns, without a model (tests/e2e/test_hub_and_after.py has one): what is printed, and how it ends."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands.chat import command as chat_module
from rlhf_mcore.config.errors import ConfigError


class Echo:
    """Answers with the question in capitals, in parts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = 0

    def forget(self) -> None:
        self.asked.clear()

    def answer(self, text: str) -> Iterator[str]:
        self.asked.append(text)
        try:
            if text == "too long":
                raise ConfigError("the conversation has 9 tokens")
            for letter in text.upper():
                yield letter
                if text == "stop me":
                    raise KeyboardInterrupt
        finally:
            self.closed += 1


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    made = Echo()
    monkeypatch.setattr(chat_module, "_load", lambda args: made)
    return made


def typed(monkeypatch: pytest.MonkeyPatch, *lines: Any) -> None:
    left = iter([*lines, EOFError()])

    def answer(prompt: str) -> str:
        line = next(left)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


def test_a_pipe_is_one_question_and_what_the_model_writes_commands_no_terminal(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\x1b[31mb\n"))
    assert chat_module.main(["run"]) == 0
    assert capsys.readouterr().out == "A\\x1b[31MB\n"


def test_a_conversation_goes_on_until_ctrl_d(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "one", "", "two")
    assert chat_module.main(["run"]) == 0
    assert echo.asked == ["one", "two"]
    assert "ONE\n" in (out := capsys.readouterr().out) and "TWO\n" in out


def test_ctrl_c_stops_an_answer_and_then_the_conversation(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "stop me", "go on", KeyboardInterrupt(), "never")
    assert chat_module.main(["run"]) == 0
    assert echo.asked == ["stop me", "go on"] and echo.closed == 2


def test_what_is_too_long_does_not_end_it_and_new_forgets(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "too long", "/new", "again")
    assert chat_module.main(["run"]) == 0
    assert echo.asked == ["again"] and "error: the conversation has 9 tokens" in capsys.readouterr().out


def test_settings_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat_module.main(["run", "--temperature", "-1"]) == 2
    assert "--temperature must be at least 0" in capsys.readouterr().err


def test_a_model_of_scores_is_no_one_to_talk_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert chat_module.main([str(tmp_path)]) == 2
    assert "a Qwen3ForSequenceClassification gives scores and writes nothing" in capsys.readouterr().err
