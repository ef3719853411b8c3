"""Test `rlhf-mcore config`: its output for existing files, and its messages for unknown keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore.cli.main import main as command
from rlhf_mcore.commands.config import main

FILE = """
output_dir: out
model: {path: m}
data: {train: [t.parquet]}
trainer: {num_steps: 4, prompts_per_step: 8}
reward: {judge: {url: "http://me:s3cret@127.0.0.1/v1", model: m}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "a.yaml").write_text(FILE)
    (tmp_path / "run" / "config.yaml").write_text(FILE.replace("num_steps: 4", "num_steps: 6"))
    return tmp_path / "a.yaml"


def run_config(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_what_is_not_a_default_is_shown_and_what_follows_from_it(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_config(capsys, "show", file, "seed=7", "--changed").splitlines()
    assert {"seed: 7", "trainer.num_steps: 4", "model.path: m", "model.tokenizer_path: m"} <= set(lines)
    assert "reward.judge.url: http://<redacted>@127.0.0.1/v1" in lines
    assert not any(line.startswith("rollout.engine:") for line in lines)
    assert "num_steps: 4" in run_config(capsys, "show", file) and "s3cret" not in run_config(capsys, "show", file)


def test_two_configurations_are_compared_by_their_keys(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in run_config(capsys, "diff", file, file.parent / "run").splitlines()]
    assert ["trainer.num_steps", "4", "6"] in lines
    assert all(first != second for _, first, second in lines)
    assert run_config(capsys, "diff", file, file) == "the same\n"


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("rollout.sampling.n", ["type     int, at least 1", "default  8"]),
        ("clip_high", ["algorithm.clip_high", "preset   dapo: 0.28"]),
        (
            "rollout.at_publish",
            [
                "continue, resubmit, drain",
                "default  null",
                "`null`: continue".replace("`", ""),
                "only with trainer.max_staleness",
            ],
        ),
        ("algorithm.kl", ["algorithm.kl.coef ", "algorithm.kl.controller ", "..."]),
        ("algorithm.kl.placement", ["one of", "loss", "reward"]),
        ("model.path", ["has to be set"]),
    ],
)
def test_a_key_is_explained(key: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = run_config(capsys, "explain", key)
    assert all(part in text for part in parts), text


def test_every_key_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from rlhf_mcore.config.keys import KEYS

    for key in KEYS:
        assert run_config(capsys, "explain", key).startswith(f"{key}: ")


def test_a_misspelt_key_or_command_is_told_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "trainer.num_stepz"]) == 2
    assert "there is no key trainer.num_stepz; did you mean trainer.num_steps?" in capsys.readouterr().err
    assert command(["trian", "x.yaml"]) == 2
    assert "there is no command trian; did you mean train?" in capsys.readouterr().err
    assert command(["xyz"]) == 2
    assert "there is no command xyz; there are: train, completion" in capsys.readouterr().err
