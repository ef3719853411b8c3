"""One node's part of a run, up to the command that torchrun gets."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
from torch.distributed.run import config_from_args, parse_args

from rlhf_mcore.cli import agent
from rlhf_mcore.cli.launch import torchrun_command
from rlhf_mcore.cli.preflight import KEPT_STARTS
from rlhf_mcore.config.errors import ConfigError

NODE = argparse.Namespace(nodes=2, node_rank=1, address="10.0.0.1", port=4567, run_id="12.0.0")


def test_torchrun_understands_what_it_is_told(tmp_path: Path) -> None:
    command = torchrun_command(agent.torchrun_options(NODE, "10.0.0.2", tmp_path), 8, ["a b.yaml", "seed=1"])
    module = command.index("rlhf_mcore.cli.torchrun")
    config, _, worker = config_from_args(parse_args(command[module + 1 :]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("bound", "10.0.0.1:4567", "12.0.0")
    assert config.rdzv_configs["rank"] == "1"
    assert (config.max_restarts, config.local_addr) == (0, "10.0.0.2")
    assert [word for word in worker if not str(word).startswith("-")][-3:] == [
        "rlhf_mcore.cli.train",
        "a b.yaml",
        "seed=1",
    ]


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
