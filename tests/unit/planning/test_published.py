"""Compare the planner's verdicts with published and with impossible configurations. planner-accuracy.md lists them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.planning.inputs import GPUS
from rlhf_mcore.planning.plan import make_plan

ROOT = Path(__file__).resolve().parents[3]
TRAIN, ALL = "training", "everything"


@dataclass(frozen=True)
class Row:
    """A configuration. ``fits``: the known result, for training alone or with resident engines."""

    name: str
    model: str
    world_size: int
    gpu: str
    overrides: str
    phases: str
    fits: bool
    tokens: int = 8192
    kl: float = 0.0


FULL = "actor.recompute.granularity=full"
ROWS = [
    Row(
        "verl 7B",
        "Qwen2.5-7B",
        8,
        "H100",
        f"actor.layout.tp=2 actor.layout.pp=2 actor.layout.sequence_parallel=true {FULL} "
        "rollout.layout.tp=2 rollout.gpu_memory_utilization=0.6",
        ALL,
        True,
        kl=0.001,
    ),
    Row(
        "verl 30B-A3B",
        "Qwen3-30B-A3B",
        32,
        "H100",
        "actor.layout.tp=4 actor.layout.pp=2 actor.layout.ep=4 actor.layout.etp=4 "
        f"actor.layout.sequence_parallel=true {FULL} rollout.layout.tp=4 rollout.gpu_memory_utilization=0.6",
        ALL,
        True,
        12288,
        0.001,
    ),
    Row("NeMo RL 8B", "Llama-3-8B", 16, "H100", f"actor.layout.pp=2 {FULL}", TRAIN, True, 4096),
    Row(
        "NeMo RL 30B-A3B",
        "Qwen3-30B-A3B",
        32,
        "H100",
        f"actor.layout.tp=2 actor.layout.ep=8 actor.layout.etp=1 actor.layout.sequence_parallel=true {FULL}",
        TRAIN,
        True,
        4096,
    ),
    Row(
        "NeMo RL 235B-A22B",
        "Qwen3-235B-A22B",
        128,
        "H100",
        "actor.layout.tp=2 actor.layout.cp=2 actor.layout.pp=8 actor.layout.ep=16 "
        f"actor.layout.etp=1 actor.layout.layers_per_stage=[11,12,12,12,12,12,12,11] actor.layout.sequence_parallel=true {FULL}",
        TRAIN,
        True,
    ),
    Row(
        "NeMo RL 32B",
        "Qwen2.5-32B",
        32,
        "H100",
        f"actor.layout.tp=4 actor.layout.pp=4 actor.layout.sequence_parallel=true {FULL}",
        TRAIN,
        True,
        4096,
    ),
    Row(
        "Megatron-Bridge 70B",
        "Llama-3-70B",
        64,
        "H100",
        "actor.layout.tp=4 actor.layout.pp=4 actor.layout.cp=2 actor.layout.vpp=5 actor.layout.sequence_parallel=true",
        TRAIN,
        True,
    ),
    Row(
        "verl 235B-A22B without its offloading",
        "Qwen3-235B-A22B",
        256,
        "H100",
        "actor.layout.tp=4 actor.layout.pp=8 actor.layout.ep=4 "
        f"actor.layout.etp=4 actor.layout.layers_per_stage=[5,14,14,14,14,14,14,5] actor.layout.sequence_parallel=true {FULL} "
        "rollout.layout.tp=8 rollout.gpu_memory_utilization=0.8 actor.offload=never",
        ALL,
        False,
    ),
    Row(
        "verl 235B-A22B",
        "Qwen3-235B-A22B",
        256,
        "H100",
        "actor.layout.tp=4 actor.layout.pp=8 actor.layout.ep=4 "
        f"actor.layout.etp=4 actor.layout.layers_per_stage=[5,14,14,14,14,14,14,5] actor.layout.sequence_parallel=true {FULL} "
        "rollout.layout.tp=8 rollout.gpu_memory_utilization=0.8 actor.offload=always",
        ALL,
        True,
        kl=0.001,
    ),
    Row(
        "verl 235B-A22B, no key set",
        "Qwen3-235B-A22B",
        256,
        "H100",
        "actor.layout.tp=4 actor.layout.pp=8 actor.layout.ep=4 "
        f"actor.layout.etp=4 actor.layout.layers_per_stage=[5,14,14,14,14,14,14,5] actor.layout.sequence_parallel=true {FULL} "
        "rollout.layout.tp=8 rollout.gpu_memory_utilization=0.8",
        ALL,
        True,
        kl=0.001,
    ),
    Row(
        "miles 80B-A3B",
        "Qwen3-Next-80B-A3B",
        32,
        "H100",
        "actor.layout.tp=2 actor.layout.pp=4 actor.layout.cp=2 actor.layout.ep=8 actor.layout.etp=1 "
        f"actor.layout.sequence_parallel=true {FULL} rollout.layout.tp=8 rollout.gpu_memory_utilization=0.8 actor.offload=always",
        ALL,
        True,
        16384,
    ),
    Row(
        "Megatron-Bridge 80B-A3B",
        "Qwen3-Next-80B-A3B",
        128,
        "H100",
        "actor.layout.ep=128 actor.layout.etp=1 "
        "actor.recompute.granularity=selective actor.recompute.modules=[layernorm,moe,moe_act]",
        TRAIN,
        True,
        4096,
    ),
    Row(
        "80B-A3B on eight",
        "Qwen3-Next-80B-A3B",
        8,
        "H100",
        f"actor.layout.ep=8 actor.layout.etp=1 {FULL}",
        TRAIN,
        False,
        4096,
    ),
    Row("7B on one device", "Qwen2.5-7B", 1, "H100", FULL, TRAIN, False),
    Row(
        "32B on eight of 40 GB",
        "Qwen2.5-32B",
        8,
        "A100-40",
        f"actor.layout.tp=8 actor.layout.sequence_parallel=true {FULL}",
        TRAIN,
        False,
    ),
    Row(
        "70B on eight",
        "Llama-3-70B",
        8,
        "H100",
        f"actor.layout.tp=8 actor.layout.sequence_parallel=true {FULL}",
        TRAIN,
        False,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_verdict_is_what_is_known(row: Row) -> None:
    own = [f"model.path={ROOT / 'configs' / 'models' / row.model}", f"trainer.max_tokens_per_microbatch={row.tokens}"]
    own += [f"algorithm.kl.coef={row.kl}", "trainer.prompts_per_step=1024", *row.overrides.split()]
    plan = make_plan(resolve(load_config(ROOT / "configs" / "base.yaml", own)), row.world_size, GPUS[row.gpu])
    phases = [phase for phase in plan.phases if row.phases == ALL or phase.phase == "actor update"]
    worst = max(phase.total / phase.available for phase in phases)
    assert all(phase.fits for phase in phases) == row.fits, f"{worst:.0%} of what is there"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_page_has_the_row(row: Row) -> None:
    page = (ROOT / "benchmarks" / "results" / "planner-accuracy.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row.name} |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:4] == [row.model, f"{row.world_size} x {row.gpu}", row.phases]
    assert cells[-2] == ("fits" if row.fits else "does not fit")
