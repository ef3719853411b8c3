"""``rlhf-mcore evaluate`` before any process starts."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from rlhf_mcore.cli import main as main_module
from rlhf_mcore.cli.arguments import receive


def test_without_a_checkpoint_it_says_what_is_missing(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main(["evaluate", "run.yaml", "data.eval=[train.jsonl]"]) == 2
    assert capsys.readouterr().err == (
        "error: evaluate.checkpoint is not set, and the run of this configuration (outputs/rlhf_mcore/default) has no checkpoint; "
        "name a model directory, as in evaluate.checkpoint=DIR\n"
    )


def test_a_directory_in_place_of_the_configuration_is_told_where_it_goes(
    workspace: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_module.main(["evaluate", "model"]) == 2
    assert "rlhf-mcore evaluate run.yaml evaluate.checkpoint=model\n" in capsys.readouterr().err


def test_a_good_configuration_is_launched_like_training(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def launch(arguments: list[str], *others: Any, logs: Any, console: str) -> int:
        handed = receive(arguments.pop().removeprefix("--resolved="))
        assert (handed.evaluate.checkpoint, handed.actor.layout.tp) == ("model", 2)
        calls.append((arguments, *others, console))
        return 7

    monkeypatch.setattr("rlhf_mcore.commands.evaluate.command.launch", launch)
    overrides = ["data.eval=[train.jsonl]", "evaluate.checkpoint=model", "actor.layout.tp=2"]
    assert main_module.main(["evaluate", "run.yaml", *overrides]) == 7
    assert calls == [(["run.yaml", *overrides], 2, 1, "rlhf_mcore.commands.evaluate.command", "auto")]


def test_a_run_or_checkpoint_is_evaluated_with_its_own_configuration(
    workspace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("model", "checkpoint-7/actor")
    shutil.copy("run.yaml", "checkpoint-7/config.yaml")
    seen: list[Any] = []

    def launch(arguments: list[str], *others: Any, logs: Any, console: str) -> int:
        seen.append(receive(arguments.pop().removeprefix("--resolved=")).evaluate)
        return 7

    monkeypatch.setattr("rlhf_mcore.commands.evaluate.command.launch", launch)
    given = ["checkpoint-7", "data.eval=[train.jsonl]", "evaluate.temperature=0.5"]
    assert main_module.main(["evaluate", *given]) == 7
    assert (seen[0].checkpoint, seen[0].temperature) == ("checkpoint-7", 0.5)


def test_under_torchrun_the_world_is_that_of_the_environment(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    overrides = ["data.eval=[train.jsonl]", "evaluate.checkpoint=model", "rollout.layout.tp=2"]
    assert main_module.main(["evaluate", "run.yaml", *overrides]) == 2
    assert "rollout.layout.tp=2 does not divide the number of processes 3" in capsys.readouterr().err
