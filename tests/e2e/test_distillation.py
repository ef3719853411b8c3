"""Train with a teacher. Its KL equals the KL to a reference with the same weights in any layout, and the run resumes bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import environment
from tests.metric_names import assert_registered
from tests.tiny_training import STEPS, assert_same_end, make, run_locally

TAUGHT = ["algorithm=distillation", "teacher.path=teacher"]
CONTEXT = "teacher.context=context.py:hint"
HINT = """
def hint(prompt, ground_truth, extra_info, data_source):
    return [{"role": "user", "content": ground_truth + " " + prompt[0]["content"]}]
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distillation")
    make(directory)
    shutil.copytree(directory / "quickstart/model", directory / "teacher")
    (directory / "context.py").write_text(HINT)
    file = directory / "teacher/model.safetensors"
    save_file({name: weight * 1.1 for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    return directory


def train(directory: Path, name: str, *overrides: str) -> tuple[Path, list[dict[str, Any]]]:
    run = run_locally(directory, name, environment(directory), *overrides)
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# The data source of these prompts selects the teacher. With the model itself, the KL would be zero.
BY_SOURCE = ["teacher.path=quickstart/model", "teacher.sources={quickstart/addition: teacher}"]
LAYOUTS = {
    "pipeline": ["teacher.layout.pp=2"],
    "by_source": [*BY_SOURCE, "teacher.layout.tp=2", "teacher.offload=by_layer"],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_teacher_is_read_as_a_reference_of_the_same_weights_is(workspace: Path, name: str) -> None:
    """The k1 KL of the same model is computed as the KL to the reference and as the teacher's KL. The teacher has another layout."""
    kl = ["algorithm.kl.coef=1e-6", "algorithm.kl.estimator=k1", "algorithm.kl.placement=reward"]
    compared = ["reference.path=teacher", *kl, "trainer.num_steps=1", "evaluate.every=0"]
    run, metrics = train(workspace, name, *TAUGHT, *compared, *LAYOUTS[name])
    assert abs(metrics[1]["teacher/kl"]) > 1e-4
    assert metrics[1]["teacher/kl"] == pytest.approx(metrics[1]["kl/mean"], rel=1e-4)
    assert_registered(run, "teacher/kl", "timing/<phase>_s", "throughput/<phase>_tokens_per_s")
    assert "timing/teacher_logprobs_s" in metrics[1]


ITSELF = ["algorithm=distillation", "teacher.weights=average", "teacher.decay=0.9", CONTEXT, "teacher.divergence=jsd"]
ITSELF += ["checkpoint.save_total_limit=10"]
ITSELF += ["evaluate.every=1"]  # otherwise the stopped run would evaluate at its last step, and the other run would not


def test_an_averaged_teacher_is_resumed_bit_for_bit(workspace: Path) -> None:
    """The teacher is an average of the policy with separate prompts, and its divergence is the loss."""
    calm, metrics = train(workspace, "calm", *ITSELF)
    parts = calm.with_name("parts")
    train(workspace, "parts", *ITSELF, "trainer.num_steps=2")
    train(workspace, "parts", *ITSELF)
    assert_same_end(parts, calm)
    assert all(row["teacher/divergence"] > 1e-4 for row in metrics[1:]), "the hint has an effect"
    assert_registered(calm, "teacher/divergence")
    check_average(workspace, parts)


def check_average(workspace: Path, run: Path) -> None:
    """Check that the teacher is the decayed average of the model and of the policies of earlier steps."""
    expected = load_file(workspace / "quickstart/model/model.safetensors")
    for step in range(1, STEPS):
        policy = load_file(run / f"checkpoint-{step}/actor/model.safetensors")
        expected = {name: 0.9 * weight + 0.1 * policy[name] for name, weight in expected.items()}
    found = load_file(run / f"checkpoint-{STEPS}/teacher/model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)
    assert any(not torch.equal(found[name], weight) for name, weight in policy.items())
