"""Run ``rlhf-mcore rollouts`` with a fleet in this process, without engines."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands.rollouts import main
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rollout.remote import control
from rlhf_mcore.rollout.remote.fleet_state import EngineStatus

TABLE = """\
engine  state     weights  requests  sampled tokens  failures
0       serving   4        12        3456            0
1       starting  none     0         0               2
"""


class Fleet:
    """A fleet that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def add(self, number: int) -> None:
        self.told.append(number)

    def drain(self, name: str) -> None:
        raise ConfigError(f"there is no engine {name!r}; there are 0, 1")

    def remove(self, name: str) -> None:
        self.told.append(name)

    def status(self) -> list[EngineStatus]:
        return [EngineStatus("0", "serving", 4, 12, 3456, 0), EngineStatus("1", "starting", -1, 0, 0, 2)]


def test_commands_reach_the_job_of_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet: Any = Fleet()
    (tmp_path / "link").symlink_to(tmp_path)
    with control.listening(fleet, tmp_path):
        for arguments in (["list"], ["add"], ["add", "3"], ["remove", "1"]):
            assert main([str(tmp_path / "link"), *arguments]) == 0
            assert capsys.readouterr() == (TABLE, "")
        assert fleet.told == [1, 3, "1"]
        assert main([str(tmp_path), "list", "--json"]) == 0
        assert [found["version"] for found in json.loads(capsys.readouterr().out)] == [4, -1]
        assert main([str(tmp_path), "drain", "7"]) == 2
        assert capsys.readouterr() == ("", "error: there is no engine '7'; there are 0, 1\n")
    assert main([str(tmp_path), "list"]) == 2
    assert "no job with engines of its own (rollout.placement=disaggregated) answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "3"], "list takes no argument, found '3'"),
        (["add", "0"], "add '0': not a number of engines; use a number from 1 to 256"),
        (["add", "many"], "add 'many': not a number of engines"),
        (["drain"], "drain: the name of an engine is missing"),
        (["remove"], "remove: the name of an engine is missing"),
    ],
)
def test_a_command_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([str(tmp_path), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}")
    assert main([str(tmp_path / "none"), *arguments]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_other_users_are_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet: Any = Fleet()
    monkeypatch.setattr(control, "_user_of", lambda _: -1)
    with control.listening(fleet, tmp_path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(control._name(tmp_path))
            assert connection.recv(100) == b""
        with pytest.raises(ConfigError, match="under this user"):
            control.ask(tmp_path, "add", number=1)
    assert fleet.told == []
