"""Follow a user from a hub id to a pushed model, before and after a training, with a stand-in for the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.hub import COMMIT, Hub, stand_in
from tests.machine_speed import scale_seconds
from tests.tiny_training import CONFIG, SMALL, make

OTHER = "f" * 40
TRAIN = [*SMALL, "model.path=Org/tiny", "data.train=Org/sums", "data.eval=Org/sums:test", "trainer.num_steps=2"]


@dataclass(frozen=True)
class Trained:
    """A finished run, and the hub from which it started."""

    hub: Hub
    directory: Path
    run: Path
    environment: Mapping[str, str]

    def command(self, *arguments: str, text: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlhf_mcore.cli.main", *arguments],
            cwd=self.directory,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            input=text,
            timeout=scale_seconds(300),
        )


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    directory = tmp_path_factory.mktemp("hub")
    make(directory)
    with stand_in() as hub:
        model = {path.name: path.read_bytes() for path in (directory / "quickstart" / "model").iterdir()}
        hub.files["models/Org/tiny"] = {**model, "pytorch_model.bin": b"no", "modeling_tiny.py": b"no"}
        data = {
            f"data/{split}-00000-of-00001.parquet": (directory / "quickstart" / f"{name}.parquet").read_bytes()
            for split, name in (("train", "train"), ("test", "eval"))
        }
        hub.files["datasets/Org/sums"] = {**data, "sums.py": b"no"}
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(directory / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }
        made = Trained(hub, directory, directory / "outputs" / "quickstart" / "grpo", environment)
        done = made.command("train", CONFIG, *TRAIN)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "model.path: Org/tiny at 0123456789ab, from the hub's cache" in done.stdout
        yield made


def test_a_run_names_the_revisions_and_has_fetched_nothing_that_runs(trained_run: Trained) -> None:
    text = (trained_run.run / "config.yaml").read_text()
    assert (
        f"models--Org--tiny/snapshots/{COMMIT}" in text and f"datasets--Org--sums/snapshots/{COMMIT}/data/test" in text
    )
    names = {path.name for path in (trained_run.directory / "cache").rglob("*") if "snapshots" in path.parts}
    assert "model.safetensors" in names and not {"pytorch_model.bin", "modeling_tiny.py", "sums.py"} & names


def test_a_run_that_continues_has_the_snapshot_that_it_began_with(trained_run: Trained) -> None:
    """Hub and cache have newer commits. The run requests nothing, and its weights equal those after two more steps."""
    refs = trained_run.directory / "cache" / "models--Org--tiny" / "refs" / "main"
    refs.write_text(OTHER)
    trained_run.hub.commits["models/Org/tiny"] = OTHER
    trained_run.hub.asked.clear()
    try:
        done = trained_run.command("train", CONFIG, *TRAIN, "trainer.num_steps=3", HF_HUB_OFFLINE="1")
    finally:
        refs.write_text(COMMIT)
        del trained_run.hub.commits["models/Org/tiny"]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the run continues after step 2 of 3" in done.stdout
    assert (
        COMMIT in (trained_run.run / "config.yaml").read_text()
        and OTHER not in (trained_run.run / "config.yaml").read_text()
    )
    assert trained_run.hub.asked == []


def test_an_evaluation_compares_with_the_id_that_training_began_with(trained_run: Trained) -> None:
    done = trained_run.command("evaluate", CONFIG, *TRAIN, "evaluate.compare=Org/tiny", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [comparison] = (trained_run.run / "evaluations").glob("*/comparison-*.json")  # names the base
    assert comparison.stem == f"comparison-{COMMIT}"


def test_push_shows_and_uploads_the_model_with_its_card(trained_run: Trained) -> None:
    shown = trained_run.command("push", str(trained_run.run), "Me/sums", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "models/Me/sums" not in trained_run.hub.files
    done = trained_run.command("push", str(trained_run.run), "Me/sums", HF_TOKEN="hf_for_this_test")
    assert done.returncode == 0, done.stderr
    files = trained_run.hub.files["models/Me/sums"]
    card = files["README.md"].decode()
    assert shown.stdout.startswith(card)
    for part in (
        "base_model: Org/tiny",
        "- Org/sums",
        "algorithm: grpo",
        "held-out accuracy",
        "rlhf_mcore ",
        "actor.optimizer.lr: 0.0001",
    ):
        assert part in card, card
    assert trained_run.hub.private["models/Me/sums"] and trained_run.hub.tokens == {"Bearer hf_for_this_test"}
    actor = trained_run.run / "latest" / "actor"
    assert files["model.safetensors"] == (actor / "model.safetensors").read_bytes()
    assert set(files) == {"README.md", *(path.name for path in actor.iterdir() if path.is_file())}
    for name, content in files.items():
        for secret in (str(trained_run.directory), str(Path.home()), "hf_for_this_test"):
            assert secret.encode() not in content, (name, secret)


def test_what_is_damaged_is_not_pushed(trained_run: Trained, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint-2"
    subprocess.run(["cp", "-r", str((trained_run.run / "checkpoint-2").resolve()), str(copy)], check=True)
    weights = copy / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    done = trained_run.command("push", str(copy), "Me/damaged")
    assert done.returncode == 2 and f"{copy} is damaged (actor/{weights.name}" in done.stderr
    assert "models/Me/damaged" not in trained_run.hub.files
