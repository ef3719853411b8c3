"""A training run of a few seconds, started like a user starts it, for tests of launching."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.commands import ROOT, run_command

CONFIG = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
STEPS = 6
REWARD = """
import time
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    end = time.monotonic() + 120
    while Path("hold").exists() and time.monotonic() < end:  # a test wants this step to last
        time.sleep(0.1)
    return (sum(map(ord, solution_str)) % 17) / 16  # differs between responses, so that there is a gradient
"""
SMALL = [
    f"trainer.num_steps={STEPS}",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.engine=hf",
    "rollout.sampling.n=2",
    "rollout.sampling.max_new_tokens=12",
    "reward.function=reward.py:score",
    "reward.timeout_s=300",
    "checkpoint.save_steps=1",
    "logging.console=plain",
    "logging.trackers=[]",
    "deterministic=true",
]


def make(directory: Path) -> None:
    """Write the model, the prompts and the reward."""
    make_quickstart(directory)
    (directory / "reward.py").write_text(REWARD)


def make_quickstart(directory: Path, num_eval: int = 4, fit_steps: int = 3) -> None:
    """Write the quickstart's data and a small model to the folder ``quickstart``. After 30 fitting steps the model writes numbers."""
    shutil.copytree(Path(_quickstart(num_eval, fit_steps).name) / "quickstart", directory / "quickstart")


def make_mixture(directory: Path) -> None:
    """Write an MoE model with random weights to the folder ``mixture``, for the quickstart's data."""
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense, target = directory / "quickstart" / "model", directory / "mixture"
    shutil.copytree(dense, target, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = AutoConfig.from_pretrained(dense).to_diff_dict()
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")
    config = Qwen3MoeConfig(
        **{name: sizes[name] for name in names if name in sizes},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(target)


@cache
def _quickstart(num_eval: int, fit_steps: int) -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory()
    tool = [sys.executable, str(ROOT / "tools" / "make_quickstart.py")]
    options = ["--fit-steps", str(fit_steps), "--num-layers", "2", "--num-eval", str(num_eval), "--threads", "1"]
    done = run_command([*tool, *options], Path(made.name))
    assert done.returncode == 0, done.stderr
    return made


def run_locally(directory: Path, name: str, environment: Mapping[str, str], *arguments: str) -> Path:
    """Train on this machine with launch/local.sh, without faults. Returns the run directory."""
    command = [str(ROOT / "launch" / "local.sh"), CONFIG, *SMALL, f"experiment={name}", *arguments]
    done = run_command(command, directory, {**environment, "RLHF_MCORE_PYTHON": sys.executable})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run_directory(directory, name)


def run_directory(directory: Path, name: str) -> Path:
    """Return the run directory of an experiment."""
    return directory / "outputs" / "quickstart" / name


def assert_same_end(found: Path, expected: Path) -> None:
    """Assert that two runs have bit-identical weights and the same metrics in every step."""
    files = sorted(path.name for path in (expected / "latest" / "actor").glob("*.safetensors"))
    assert files
    for name in files:
        assert (found / "latest" / "actor" / name).read_bytes() == (expected / "latest" / "actor" / name).read_bytes()
    differing = [
        (one["step"], name, one.get(name), other.get(name))
        for one, other in zip(_metrics(found), _metrics(expected), strict=True)
        for name in sorted(one | other)
        if one.get(name) != other.get(name)
    ]
    assert not differing, differing
    assert [row["step"] for row in _metrics(found)] == list(range(STEPS + 1))


def _metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    unequal = ("timing/", "throughput/", "bridge/")  # rates, and bytes, which depend on the ranks that share a node
    return [{key: value for key, value in row.items() if not key.startswith(unequal)} for row in rows]
