"""An engine that is a server, added by an installed package: a whole run with it, by a user's command."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, python_path, run_command
from tests.tiny_training import make_quickstart

SETTINGS = (
    "rollout.engine=served",
    "bridge.method=gather",
    "actor.layout.tp=2",
    "rollout.layout.tp=1",
    "trainer.num_steps=2",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.sampling.n=4",
    "evaluate.every=0",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickstart, and a package that adds the engine, as pip would have installed it."""
    path = tmp_path_factory.mktemp("served")
    make_quickstart(path, num_eval=4)
    package = path / "packages" / "served_engine-1.dist-info"
    package.mkdir(parents=True)
    (package / "entry_points.txt").write_text("[rlhf_mcore.engines]\nserved = tests.e2e.served_engine:KIND\n")
    return path


def test_a_run_samples_from_a_server_that_takes_weights_by_its_own_call(directory: Path) -> None:
    """Two ranks share the model; the canary compares the server's logprobs with theirs after every sync."""
    path = f"{ROOT}{os.pathsep}{directory / 'packages'}"
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, "experiment=served", *SETTINGS]
    done = run_command(command, directory, {**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = directory / "outputs" / "quickstart" / "served"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "actor/grad_norm" in row] == [1, 2]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in rows if "actor/grad_norm" in row)
    served = [tuple(map(int, line.split())) for line in (directory / "served.txt").read_text().splitlines()]
    assert [version for version, number in served if number == 16] == [0, 1]
    assert {version for version, _ in served} == {0, 1, 2}  # the canary asked for all of them


def test_without_the_package_the_name_is_no_engine(directory: Path) -> None:
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, *SETTINGS]
    done = run_command(command, directory, {**os.environ, "PYTHONPATH": python_path()})
    assert done.returncode == 2
    assert "rollout.engine='served' is not a choice; did you mean 'server'? There are: hf, server, vllm" in done.stderr
