"""Run two steps of GRPO with a random model on two ranks. Engine and trainer compute the same logprobs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.families.mtp import REPEATED
from tests.commands import ROOT, environment, run_command
from tests.difference import first_difference
from tests.distributed.models import FURTHER_MODELS, MODELS, MOE_MODELS, add_mtp_layer, make, pack
from tests.e2e.processors import has_amx, has_delta_kernels, older_processor
from tests.tiny_training import make_quickstart

# On a CPU, vLLM's kernels for latent attention and gated delta nets support only some head sizes, and only bf16.
# The values bound the differences of logprobs in nats. If bf16 may change the choice of experts, the bound is the
# metric's warning limit.
IN_BF16 = {"deepseek_v3_heads": ("max", 0.3), "glm4_moe_lite": ("max", 0.3), "qwen3_next": ("mean", 0.1)}
_BY_TRANSFORMERS = ("deepseek", "glm_moe_dsa", "minimax", "qwen3_5")  # vLLM's CPU build cannot route MiniMax-M2
BY_TRANSFORMERS = [name for name in FURTHER_MODELS if name.startswith(_BY_TRANSFORMERS) and name not in IN_BF16]
BY_TRANSFORMERS += ["nemotron_h"]  # vLLM's CPU build has no experts without gates
WITH_MTP = ("deepseek_v3", "deepseek_v3_heads", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa")
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


# One model for each mechanism of an engine. EVERY_FAMILY=1 runs all models.
MECHANISMS = (
    "deepseek_v3",  # transformers' engine, and a trained MTP layer
    "deepseek_v3_heads",  # vLLM's latent attention in bf16, and its drafts
    "gemma3_text",  # sliding-window attention
    "gpt_oss",  # experts in one tensor, read from mxfp4
    "olmo2",  # a family that vLLM runs with transformers' modules
    "qwen3_next",  # gated delta nets
    "nemotron_h_dense",  # state spaces, whose decay rates vLLM computes from the weights
)
MODEL_NAMES = tuple({**MODELS, **MOE_MODELS, **FURTHER_MODELS}) if os.environ.get("EVERY_FAMILY") else MECHANISMS


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_engine_and_trainer_agree_while_the_weights_change(workspace: Path, name: str) -> None:
    if name == "qwen3_next" and not has_delta_kernels:
        pytest.skip("vLLM's gated delta nets need avx512_bf16 on a processor with AVX-512")
    check_agreement(workspace, name, name, environment(workspace))


@pytest.mark.skipif(not has_amx, reason="this processor has no AMX, so vLLM takes these kernels above")
def test_latent_attention_agrees_without_amx(workspace: Path) -> None:
    """Without AMX, vLLM computes latent attention with other kernels."""
    check_agreement(workspace, "deepseek_v3_heads", "without_amx", older_processor(environment(workspace)))


def test_trained_indexers_reach_the_engine(workspace: Path) -> None:
    more = ["actor.indexer=sparse", "actor.optimizer.lr=1e-3"]
    saved, steps = check_agreement(workspace, "deepseek_v32", "indexers", environment(workspace), more)
    before = load_file(workspace / "deepseek_v32" / "model.safetensors")
    assert all(not torch.equal(saved[name], before[name]) for name in before if ".indexer." in name)
    assert all(step["actor/indexer_loss"] > 0 and step["actor/indexer_grad_norm"] > 0 for step in steps)


def check_agreement(
    workspace: Path, name: str, experiment: str, variables: dict[str, str], more: Sequence[str] = ()
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Train two steps, and compare the engine's logprobs with the trainer's. Return saved tensors and metrics.

    With ``more`` settings, the model has no MTP layer.
    """
    known = json.loads((workspace / "quickstart" / "model" / "config.json").read_text())
    tokens = {key: known[key] for key in ("vocab_size", "eos_token_id", "bos_token_id", "pad_token_id")}
    shutil.rmtree(workspace / name, ignore_errors=True)
    make(name, workspace / name, **tokens)
    mtp = add_mtp_layer(workspace / name) if name in WITH_MTP and not more else {}
    learns = {tensor: mtp.pop(tensor) for tensor in sorted(mtp)}
    if learns:  # an unknown tensor is kept
        mtp = {"model.layers.4.unknown.weight": torch.arange(3.0)}
        held = workspace / name / "model.safetensors"
        save_file({**load_file(held), **mtp}, held, {"format": "pt"})
    if name == "gpt_oss":
        pack(workspace / name)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(workspace / "quickstart" / "model" / file, workspace / name)
    engine = "hf" if name in BY_TRANSFORMERS else "vllm"
    options = [
        f"model.path={name}",
        f"rollout.engine={engine}",
        "actor.layout.sequence_parallel=true",
        *more,
    ]
    if name == "gpt_oss":
        options += ["actor.layout.ep=2", "actor.layout.etp=1"]
    if name in IN_BF16:
        options += ["model.dtype=bf16"]
    if learns:
        options += ["actor.mtp.mode=train"]
        options += ["rollout.speculative.method=mtp"] if engine == "vllm" else []
    steps = [step for step in train(workspace, experiment, [*SMALL, *options], variables) if step["step"]]
    assert len(steps) == 2
    statistic, limit = IN_BF16.get(name, ("max", 1e-4))
    for step in steps:
        assert 0 < step[f"rollout/logprob_diff_{statistic}"] < limit
        assert step["actor/grad_norm"] > 0 and step["actor/skipped_updates"] == 0
        assert not learns or (step["actor/mtp_loss"] > 0 and step["actor/mtp_grad_norm"] > 0)
        assert (0 <= step.get("rollout/draft_acceptance/1", -1) <= 1) == (bool(learns) and engine == "vllm")
    saved = dict(HFReader(workspace / "outputs" / "quickstart" / experiment / "latest" / "actor").tensors())
    assert first_difference({tensor: saved[tensor] for tensor in mtp}, mtp) == ""
    for tensor, before in learns.items():
        of = tensor.removeprefix("model.layers.4.")
        if of in REPEATED:
            assert torch.equal(saved[tensor], saved[REPEATED[of]])
        elif (
            "experts" not in tensor and name not in IN_BF16
        ):  # an expert may have received no token, and bf16 rounds small steps away
            is_same = torch.equal(saved[tensor].float(), before.float())
            is_frozen = of.endswith("e_score_correction_bias") or ".indexer." in of
            assert saved[tensor].isfinite().all() and is_same == is_frozen, tensor
    return saved, steps


def train(directory: Path, name: str, options: list[str], variables: dict[str, str]) -> list[dict[str, Any]]:
    """Return the metrics of a run, from step 0 on."""
    arguments = [str(ROOT / "configs" / "quickstart" / "grpo.yaml"), f"experiment={name}", *options]
    done = run_command([sys.executable, "-m", "rlhf_mcore.cli.main", "train", *arguments], directory, variables, 240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (directory / "outputs" / "quickstart" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
