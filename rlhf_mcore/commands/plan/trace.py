"""``rlhf-mcore plan --trace``: compare the planner's bytes with the bytes that Megatron allocates for one rank on fake tensors."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.data.collate import RowTokens, make_microbatches
from rlhf_mcore.mcore.build import BuildOptions
from rlhf_mcore.mcore.dry_run import dry_run, fake_world
from rlhf_mcore.mcore.model import LossFunction, MegatronModel, Metrics
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import GIB, Assumptions, rank_share, roles_of, workload
from rlhf_mcore.planning.memory import Pass, state_bytes, training_activations
from rlhf_mcore.planning.report import table
from rlhf_mcore.platform.cpu import CpuPlatform
from rlhf_mcore.roles.trained_weights import matrices_of
from rlhf_mcore.types import Microbatch


def compare_with_trace(cfg: Config, world_size: int, rank: int, dtype: str, assumed: Assumptions) -> str:
    """Return a table that compares the bytes of the actor's update on ``rank``: the formulas' and Megatron's allocations."""
    started, role = time.monotonic(), roles_of(cfg, world_size, dtype)[0]
    layout = role.layout
    # A stage stores at most as many microbatches as there are stages, so more microbatches change nothing.
    count = min(rank_share(workload(cfg, assumed), role).num_microbatches, layout.pp)
    if layout.vpp:
        count = layout.pp
    multiple = layout.tp * layout.token_multiple
    tokens = cfg.trainer.max_tokens_per_microbatch // multiple * multiple
    spec = load_spec(cfg.model.path, run_kind(cfg).head, needs_weights=False)
    options = BuildOptions(role.dtype, "local", role.recompute, True, False, cfg.seed)
    logging.disable(logging.WARNING)
    with fake_world(rank, world_size):
        microbatches = [_microbatch(tokens, layout) for _ in range(count)]
        usage = dry_run(
            spec,
            layout,
            CpuPlatform(),
            options,
            _loss,
            microbatches,
            lambda model: model.add_optimizer(cfg.actor.optimizer, matrices_of(spec.geometry)),
        )
    state = state_bytes(role, rank)
    stage = layout.coordinates(rank)["pp"]
    # A trace has balanced experts and no shared prefixes. It computes experts one by one.
    kept = training_activations(Pass(role, tokens // layout.cp, groups_experts=False), stage, count).total
    pairs = (
        ("weights", state.weights, usage.weights),
        ("gradients", state.gradients, usage.gradients),
        ("masters and moments", state.masters + state.moments, usage.optimizer),
        ("activations and logits", kept, usage.activations),
    )
    rows = [
        (name, f"{formula / GIB:.3f}", f"{traced_bytes / GIB:.3f}", _difference(formula, traced_bytes))
        for name, formula, traced_bytes in pairs
    ]
    header = (f"actor, rank {rank} (GiB)", "formula", "traced", "difference")
    setting = (
        f"(an update over {count} microbatches of {tokens} tokens, on fake tensors; {time.monotonic() - started:.0f} s)"
    )
    return "\n".join([*table(header, rows), setting])


def _difference(formula: int, traced_bytes: int) -> str:
    return "none" if formula == traced_bytes else f"{traced_bytes / max(formula, 1) - 1:+.1%}"


def _microbatch(tokens: int, layout: ParallelLayout) -> Microbatch:
    row = RowTokens([0], [tokens], {"token_ids": torch.zeros(tokens, dtype=torch.int32)})
    (microbatch,) = make_microbatches(
        row, max_tokens=tokens, packing=False, pad_multiple=layout.tp * layout.token_multiple
    )
    return microbatch


def _loss(model: MegatronModel) -> LossFunction:
    """Return a loss that sums all logprobs, or a scalar head's outputs, because a sum needs little extra memory."""

    def loss(outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        if model.spec.geometry.head == "lm":
            outputs = model.logprobs_and_entropy(outputs, microbatch, 1.0).logprobs
        return outputs.sum(), {}

    return loss
