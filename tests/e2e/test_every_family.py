"""Two steps of GRPO with a random model of a family, cut over two ranks: what the engine says of its tokens, the trainer says too."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, environment, finished
from tests.distributed.models import FURTHER_MODELS, MODELS, MOE_MODELS, make
from tests.tiny_training import make_quickstart

# vLLM's kernels for latent attention have one size of heads and bf16 only; stacked experts are refused with it.
BY_TRANSFORMERS = [name for name in FURTHER_MODELS if name.startswith(("deepseek", "gpt_oss"))]
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    return (sum(map(ord, solution_str)) % 17) / 16  # differs between responses, so that there is a gradient
"""
SMALL = [
    "trainer.num_steps=2",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.sampling.n=4",
    "reward.function=reward.py:score",
    "bridge.verify=digest",
    "evaluate.every=0",
    "logging.console=plain",
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    make_quickstart(directory, num_eval=2)
    (directory / "reward.py").write_text(REWARD)
    return directory


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in (*MODELS, *MOE_MODELS, *FURTHER_MODELS)
            if name != "deepseek_v3"
        ),
    ],
)
def test_engine_and_trainer_agree_while_the_weights_change(workspace: Path, name: str) -> None:
    known = json.loads((workspace / "quickstart" / "model" / "config.json").read_text())
    tokens = {key: known[key] for key in ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")}
    make(name, workspace / name, **tokens)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(workspace / "quickstart" / "model" / file, workspace / name)
    engine = "hf" if name in BY_TRANSFORMERS else "vllm"
    options = [
        f"experiment={name}",
        f"model.path={name}",
        f"rollout.engine={engine}",
        "actor.layout.sequence_parallel=true",
    ]
    if name == "gpt_oss":
        options += ["actor.layout.ep=2", "actor.layout.etp=1"]
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, *SMALL, *options]
    done = finished(command, workspace, environment(workspace), 240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (workspace / "outputs" / "quickstart" / name / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if json.loads(line)["step"]]
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["rollout/logprob_diff_max"] < 1e-4
        assert step["actor/grad_norm"] > 0 and step["actor/skipped_updates"] == 0
