"""Run ``rlhf-mcore evaluate`` as a user does. Its score equals the training run's, and a killed job continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.commands import ROOT, run_command
from tests.tiny_training import make_quickstart
from tests.unit.bridge.formats.foreign import write_flat

CONFIG = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
PROMPTS, SAMPLES = 12, 4
SAMPLED = [
    f"evaluate.samples={SAMPLES}",
    "evaluate.temperature=1.0",
    "rollout.max_num_seqs=2",
]  # batches of two prompts
# Every character counts, so equal scores mean equal responses. Each call is recorded.
# If the file ``kill`` exists, the rank is killed in the middle of scoring.
REWARD = """
import os, signal

def grade(data_source, solution_str, ground_truth, extra_info):
    if open(f"/proc/{os.getppid()}/comm").read().startswith("rank "):  # before the ranks the command tries the reward
        with open("calls.log", "a") as log:
            log.write(f"{extra_info['index']}\\n")
        if os.path.exists("kill") and extra_info["index"] == int(open("kill").read()):
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
    return sum((place + 1) * ord(letter) for place, letter in enumerate(solution_str)) / 1e4
"""


def rlhf_mcore(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, *arguments], directory, {**os.environ, "PYTHONPATH": str(ROOT)})


def evaluate(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    reward = ["reward.function=reward.py:grade", "reward.workers=1"]
    return rlhf_mcore(directory, "-m", "rlhf_mcore.cli.main", "evaluate", CONFIG, *reward, *SAMPLED, *overrides)


def results(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return content


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluate")
    make_quickstart(directory, PROMPTS)
    (directory / "reward.py").write_text(REWARD)
    return directory


@pytest.fixture(scope="module")
def reward_model(workspace: Path) -> Path:
    """Return a reward model with random weights, with the quickstart's family and vocabulary."""
    import torch
    from transformers import AutoConfig, Qwen3ForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(workspace / "quickstart" / "model", num_labels=1)
    Qwen3ForSequenceClassification(config).save_pretrained(workspace / "rm")
    return workspace / "rm"


def test_the_number_is_that_of_the_training_run(workspace: Path, reward_model: Path) -> None:
    one = ["actor.layout.tp=1", "trainer.world_size=1", f"reward.model.path={reward_model}", "reward.model.weight=0.5"]
    short = ["trainer.num_steps=1", "trainer.prompts_per_step=4", "trainer.minibatch_size=4", "rollout.sampling.n=2"]
    reward = "reward.function=reward.py:grade"
    command = [
        "-m",
        "rlhf_mcore.cli.main",
        "train",
        CONFIG,
        reward,
        *one,
        *short,
        *SAMPLED,
        "logging.trackers=[]",
    ]
    trained = rlhf_mcore(workspace, *command)
    assert trained.returncode == 0, trained.stderr[-3000:]
    run = workspace / "outputs" / "quickstart" / "grpo"
    before, after = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())

    done = evaluate(workspace, *one)  # without a checkpoint: the latest checkpoint of this configuration's run
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (folder,) = (run / "evaluations").iterdir()
    found = results(folder)["results"]["all"]
    reported = {name.removeprefix("evaluate/"): value for name, value in after.items() if name.startswith("evaluate/")}
    assert reported.keys() >= {"reward", "accuracy", "response_length_mean", "pass_at_4", "majority_at_2"}
    assert {name: found[name]["value"] for name in reported} == reported
    assert after["evaluate/reward"] != before["evaluate/reward"]
    scores = [json.loads(line)["score"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    responses = [json.loads(line)["response"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    by_function = [sum((i + 1) * ord(c) for i, c in enumerate(text)) / 1e4 for text in responses]
    assert all(abs(score - part) > 1e-6 for score, part in zip(scores, by_function, strict=True))  # both scores count
    assert (found["num_prompts"], found["num_responses"]) == (PROMPTS, PROMPTS * SAMPLES)
    assert folder.name.startswith("checkpoint-1-") and "accuracy" in done.stdout


@pytest.fixture(scope="module")
def uninterrupted_run(workspace: Path) -> Path:
    """Evaluate two models in one process. The second is the first under another name."""
    (workspace / "copy").symlink_to("quickstart/model")
    options = ["evaluate.checkpoint=quickstart/model", "evaluate.compare=copy", "evaluate.output_dir=whole"]
    done = evaluate(workspace, "rollout.engine=hf", "trainer.world_size=1", "actor.layout.tp=1", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return workspace / "whole"


def test_a_model_compared_with_itself_is_no_better(uninterrupted_run: Path) -> None:
    (file,) = uninterrupted_run.glob("comparison-*.json")
    content = json.loads(file.read_text())
    assert (content["baseline"], content["evaluated"]) == ("copy", "quickstart/model") and content[
        "num_prompts"
    ] == PROMPTS
    assert content["reward"]["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert (content["reward"]["ties"], content["reward"]["sign_test_p"]) == (PROMPTS, 1.0)
    assert (uninterrupted_run / "compare" / "samples.jsonl").read_bytes() == (
        uninterrupted_run / "samples.jsonl"
    ).read_bytes()


def test_shards_of_other_trainers_are_read_as_they_are(workspace: Path, uninterrupted_run: Path) -> None:
    """FSDP and Megatron checkpoints of a model give the model's responses. No converted copy is written."""
    model = workspace / "quickstart" / "model"
    write_flat(workspace / "fsdp", load_file(model / "model.safetensors"), 2, padded=True)
    convert = ["-m", "rlhf_mcore.cli.main", "convert", "--from", "hf", "--to", "megatron", str(model), "megatron"]
    assert rlhf_mcore(workspace, *convert).returncode == 0
    before = sorted(workspace.rglob("*.safetensors"))
    options = ["evaluate.checkpoint=fsdp", "evaluate.compare=megatron", "evaluate.output_dir=sharded"]
    done = evaluate(workspace, "rollout.engine=hf", "trainer.world_size=1", "actor.layout.tp=1", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for folder in ("sharded", "sharded/compare"):
        assert (workspace / folder / "samples.jsonl").read_bytes() == (uninterrupted_run / "samples.jsonl").read_bytes()
    first, second = (results(workspace / folder)["settings"]["model"] for folder in ("sharded", "sharded/compare"))
    assert first["weights"] != second["weights"] and len(first["weights"]) == 2
    assert sorted(workspace.rglob("*.safetensors")) == before
    assert "fsdp against megatron" in done.stdout


def test_killed_and_started_again_on_two_processes_the_files_are_the_same(
    workspace: Path, uninterrupted_run: Path
) -> None:
    options = ["rollout.engine=hf", "evaluate.checkpoint=quickstart/model", "evaluate.output_dir=killed"]
    calls, kill, output = workspace / "calls.log", workspace / "kill", workspace / "killed"
    calls.unlink()
    kill.write_text("6")  # the second batch of the first engine
    killed = evaluate(workspace, *options)
    assert killed.returncode == 128 + signal.SIGKILL
    kept = [json.loads(line) for part in (output / "parts").iterdir() for line in part.read_text().splitlines()]
    scored = {record["samples"][0]["index"] for record in kept}
    assert scored >= {0, 2} and 6 not in scored
    (output / "parts" / "engine-00000-of-00002.jsonl").open("a").write('{"samples": [{"index"')  # half a line
    kill.unlink()

    again = evaluate(workspace, *options)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    for name in ("samples.jsonl", "results.json"):
        assert (output / name).read_bytes() == (uninterrupted_run / name).read_bytes(), name
    count = Counter(map(int, calls.read_text().split()))
    assert {index: count[index] for index in scored} == dict.fromkeys(scored, SAMPLES)
    assert not (output / "parts").exists()

    calls.unlink()
    finished = evaluate(workspace, *options)
    assert finished.returncode == 0 and "accuracy" in finished.stdout
    assert not calls.exists()  # nothing was scored again
