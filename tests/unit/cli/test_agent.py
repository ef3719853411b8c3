"""Run the agent of one node, up to the command of its supervisor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_mcore.cli import agent, supervisor
from rlhf_mcore.cli.preflight import KEPT_STARTS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.rank_file import RankFiles
from rlhf_mcore.own_processes import has_ended


def test_where_nodes_meet_is_one_line_for_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: {path: model}\n")
    arguments = ["run.yaml", "experiment='a b'", "trainer.max_restarts=3", "--meet=127.0.0.1", "--run-id=7.0.0"]
    assert agent.main(arguments) == 0
    address, port, max_restarts, logs = capsys.readouterr().out.rstrip("\n").split(" ", 3)
    assert (address, max_restarts) == ("127.0.0.1", "3") and int(port) > 0
    assert logs == str(tmp_path / "outputs" / "rlhf_mcore" / "a b" / "logs" / "7.0.0")


def test_the_supervisor_understands_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: {path: model}\n")
    commands: list[list[str]] = []
    monkeypatch.setattr(agent, "run_child", lambda command, *_: commands.append(command) or 0)
    options = [
        "--nodes=2",
        "--node-rank=1",
        "--ranks-per-node=8",
        "--address=127.0.0.1",
        "--port=4567",
        "--run-id=12.0.0",
    ]
    assert agent.main([*options, "run.yaml", "experiment='a b'"]) == 0
    args = supervisor._parser().parse_args(commands[0][3:])
    assert (args.nodes, args.node_rank, args.ranks, args.address, args.port) == (2, 1, 8, "127.0.0.1", 4567)
    assert args.logs == tmp_path / "outputs" / "rlhf_mcore" / "a b" / "logs" / "12.0.0" / "node-1"
    assert (args.module, args.arguments) == ("rlhf_mcore.cli.train", ["run.yaml", "experiment='a b'"])
    assert supervisor._environment(args, 3, 4567, RankFiles(has_ended))["RANK"] == "11"


def test_an_interface_that_is_not_there_is_named() -> None:
    assert agent.meeting_address("127.0.0.1", "lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"--interface ib7: not an interface of .*; use .*lo"):
        agent.meeting_address("127.0.0.1", "ib7")


def test_the_first_failure_is_the_outcome(tmp_path: Path) -> None:
    for code, node in ((7, 1), (137, 0)):
        agent._record(tmp_path / agent.OUTCOME, code, node, 3.0)
    assert (tmp_path / agent.OUTCOME).read_text().startswith("7 node 1 (")


def test_the_logs_of_the_newest_attempts_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    for number in range(25):
        (tmp_path / f"{number}.0.0" / "node-0").mkdir(parents=True)
        os.utime(tmp_path / f"{number}.0.0", (number, number))
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("24.0.0")
    os.utime(tmp_path / "mine", (0, 0))
    agent.prune_logs(tmp_path)
    kept = {f"{number}.0.0" for number in range(25 - (KEPT_STARTS - 1), 25)}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"mine", "link"}
    agent.prune_logs(tmp_path / "not there")
