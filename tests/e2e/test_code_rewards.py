"""Train a policy that writes programs, some of them hostile. They run in the sandbox, and training continues."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, run_command
from tests.metric_names import assert_registered

READ = "a,b=map(int,input().split())\n"
ADDS, SUBTRACTS = READ + "print(a+b)", READ + "print(a-b)"
BOMB, HOARD = "import os\nwhile 1:os.fork()", "print(len(bytes(10**11)))"
WRITES = {"add": (ADDS, SUBTRACTS), "fork": (BOMB, ADDS), "hoard": (HOARD, ADDS)}  # prompt: responses of the model
SETTINGS = {
    "model.path": "model",
    "data.train": "[train.jsonl]",
    "data.eval": "[]",
    "evaluate.every": "0",
    "data.answer_key": "answer",
    "reward.rules": "[{name: code, test_s: 1.0, total_s: 2.0}]",
    "reward.sandbox.memory_gib": "0.5",
    "rollout.engine": "hf",
    "rollout.sampling.n": "8",
    "rollout.sampling.max_new_tokens": "48",
    "actor.layout.tp": "1",
    "trainer.world_size": "1",
    "trainer.num_steps": "2",
    "trainer.prompts_per_step": "3",
    "trainer.minibatch_size": "3",
    "logging.rollouts_every": "1",
    "logging.trackers": "[]",
    "logging.console": "plain",
    "output_dir": "outputs",
    "experiment": "code",
}


def fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit a model that writes these programs from memory, and write rows with the tests of an addition."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from make_environments import Episode, fit_model
    from make_quickstart import Fit, make_model, make_tokenizer

    def draw(rng: random.Random, careless: bool) -> Episode:
        task = rng.choice(list(WRITES))
        return [("user", task), ("assistant", rng.choice(WRITES[task]))]

    tokenizer = make_tokenizer()
    model = make_model(tokenizer, 2, 0)
    fit_model(model, tokenizer, draw, Fit(45, 24, 3e-3), 0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    tests = {"inputs": ["2 3\n", "40 2\n"], "outputs": ["5\n", "42\n"]}
    rows = [{"prompt": [{"role": "user", "content": task}], "answer": json.dumps(tests)} for task in WRITES]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_fault_24_programs_of_a_policy_are_graded_and_harm_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, monkeypatch)
    command = [sys.executable, "-m", "rlhf_mcore.cli.train", str(ROOT / "configs" / "quickstart" / "grpo.yaml")]
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    done = run_command([*command, *settings], tmp_path, seconds=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "outputs" / "quickstart" / "code"
    files = sorted((run / "rollouts").glob("*.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(records) == 2 * 3 * 8
    written = {record["response"] for record in records}
    assert {ADDS, BOMB, HOARD} <= written, written  # the policy has sampled them
    known = [record for record in records if record["response"] in (ADDS, SUBTRACTS, BOMB, HOARD)]
    assert [record["score"] for record in known] == [float(record["response"] == ADDS) for record in known]
    assert all(record["failure"] is None for record in records)  # a failing program is a wrong answer
    assert_registered(run, "reward/parse_failures")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    assert [(line["reward/errors"], line["reward/timeouts"]) for line in steps] == [(0, 0)] * 2
    assert all(0 < line["reward/mean"] < 1 for line in steps)
