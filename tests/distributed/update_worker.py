"""Compare one update under every layout, cut and packing with plain transformers: loss, gradient norm and new weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.algorithms.advantages import group_relative
from rlhf_mcore.config.choices import POLICY_LOSSES
from rlhf_mcore.config.schema import CovarianceConfig, OptimizerConfig, RecomputeConfig, RolloutCorrectionConfig
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.types import TrainBatch
from tests.covering import covering_rows
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import (
    CONTEXT_LAYOUTS,
    LAYOUTS,
    TEMPERATURE,
    UNEVEN_LAYOUTS,
    Settings,
    algorithm,
    batch_for,
    batch_of_learner,
    build,
    finish,
    gatherer,
    groups_of,
    hf_logprobs,
    load_hf,
    rows,
    sizes_of,
    start,
)

MODELS = ("qwen3_tied", "qwen2", "llama", "qwen3_seven")
NUM_SMALL_STEPS, SMALL_LR = 12, 2e-5
CUTS = {"one": 10_000, "many": 24}
OWNERS = ("spread", "last rank", "learner")
RECOMPUTE = {
    "off": None,
    "selective": RecomputeConfig(granularity="selective"),
    "full_uniform": RecomputeConfig(granularity="full", num_layers=1),
    "full_block": RecomputeConfig(granularity="block", num_layers=1),
    "mlp_and_attention": RecomputeConfig(granularity="selective", modules=["mlp", "core_attn"]),
}
# Small buckets, so that several buckets are reduced and gathered one after the other.
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}
# The default optimizer of these checks, with half of its state in host memory.
HOSTED = OptimizerConfig(lr=1e-2, eps=1e-3, clip_grad=0.5, weight_decay=0.1, offload=0.5)
AGGREGATIONS = ("token", "sequence", "constant")
LOSSES = {f"{loss}/{by}": (loss, by, "off") for loss in POLICY_LOSSES for by in AGGREGATIONS} | {
    f"corrected by {mode}": ("ppo_clip", "sequence", mode) for mode in ("token", "sequence")
}
BOUNDS = {"dppo_tv": 0.5}  # masks other tokens than the divergence of dppo_kl
COVARIANCE = CovarianceConfig(share=0.3, high=9).model_copy(update={"low": -9})  # selects some of the few tokens
UNSHARED, SHARED = "dp4/packed", ("cp2_dp2/packed", "cp2_dp2/padded", "cp4/packed", "cp4/padded")
# Padded, packed, padded, ...
OLD_LAYOUTS = ("dp4", "tp2_dp2_sp", "pp2_vpp2_dp2", "tp2_pp2", "cp2_dp2", "cp4", "pp2_cp2")
OVERLAPPED_LAYOUTS = ("tp2_dp2_sp", "pp2_vpp2_dp2", "cp2_dp2")


def cells() -> list[dict[str, Any]]:
    """Return the updates. Every model and layout occurs, and each size of a layout with each model, cut, packing and ownership."""
    factors = {
        "model": MODELS,
        "layout": [*LAYOUTS, *CONTEXT_LAYOUTS, *UNEVEN_LAYOUTS],
        "cut": tuple(CUTS),
        "packing": ("packed", "padded"),
        "owner": OWNERS,
    }
    return covering_rows(
        factors,
        lambda row: (row["layout"] in UNEVEN_LAYOUTS) == (row["model"] == "qwen3_seven"),
        lambda row: {**row, **sizes_of(row["layout"]), "layout": None},
    )


def shared_losses() -> dict[str, list[str]]:
    """Return the losses for each kind of sequence split. Each policy loss occurs with each layout, packing and aggregation."""

    def features(row: dict[str, str]) -> dict[str, str]:
        names = ("layout", "packing", "policy", "by", "mode")
        return dict(zip(names, (*row["where"].split("/"), *LOSSES[row["loss"]]), strict=True))

    rows = covering_rows({"loss": tuple(LOSSES), "where": SHARED}, features=features)
    return {where: [row["loss"] for row in rows if row["where"] == where] for where in SHARED}


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    parts = ("oracle", "updates", "recompute", "overlap", "losses", "precision", "old")
    findings: dict[str, Any] = {part: {} for part in parts}
    for name in MODELS:
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
            reference = models.make(name, directory / f"{name}_reference", seed=7)
            findings["oracle"][name] = oracle(path, reference, directory / f"{name}_after")
        dist.barrier()
        after = load_file(directory / f"{name}_after" / "model.safetensors")
        reference = load_hf(directory / f"{name}_reference")
        for cell in cells():
            if cell["model"] != name:
                continue
            is_cut = cell["cut"] == "many"
            settings = Settings(
                max_tokens=CUTS[cell["cut"]],
                packing=cell["packing"] == "packed",
                logit_chunk_tokens=5 if is_cut else None,
            )
            made = groups_of(cell["layout"], groups)
            found = update(path, made, platform, settings, reference, after, cell["owner"])
            findings["updates"]["/".join(cell.values())] = found
    path, reference = directory / "qwen3_tied", load_hf(directory / "qwen3_tied_reference")
    for number, layout in enumerate(OLD_LAYOUTS):
        settings = Settings(max_tokens=24, packing=number % 2 == 1, logit_chunk_tokens=5)
        _, actor = build(path, groups_of(layout, groups), platform, settings)
        findings["old"][layout] = old_of_update(actor, reference)
    for kind, recompute in RECOMPUTE.items():
        settings = Settings(max_tokens=24, recompute=recompute)
        findings["recompute"][kind] = update(path, groups_of("tp2_pp2", groups), platform, settings, reference, None)
    for layout in OVERLAPPED_LAYOUTS:
        settings = Settings(max_tokens=48, epochs=2)
        plain = twice(path, groups_of(layout, groups), platform, settings, reference, None)
        overlapped = replace(settings, megatron=OVERLAP, optimizer=HOSTED)
        found = twice(path, groups_of(layout, groups), platform, overlapped, reference, plain[1])
        findings["overlap"][layout] = {"plain": plain[0], "overlapped": found[0], "weights": found[2]}
    for where, losses in {UNSHARED: list(LOSSES), **shared_losses()}.items():
        layout, _, packing = where.partition("/")
        made = every_loss(path, groups_of(layout, groups), platform, packing == "packed", reference, losses)
        findings["losses"][where] = made
    for dtype in ("bf16", "fp16"):
        findings["precision"][dtype] = small_steps(path, groups_of("tp2_dp2", groups), platform, dtype, reference)
    finish(findings, directory)


def every_loss(
    path: Path, groups: ModelGroups, platform: Any, packing: bool, reference: torch.nn.Module, losses: list[str]
) -> dict[str, dict[str, float]]:
    """Return the metrics of an update by each of these losses. Weights stay unchanged."""
    _, actor = build(path, groups, platform, Settings(max_tokens=48, packing=packing))
    placed, found = actor.model, {}
    placed.optimizer = OptimizerConfig(lr=0.0)
    for name in losses:
        loss, aggregation, mode = LOSSES[name]
        correction = RolloutCorrectionConfig(mode=mode, cap=0.1)
        cfg = algorithm(aggregation).model_copy(
            update={"policy_loss": loss, "rollout_correction": correction, "covariance": COVARIANCE}
        )
        if bound := BOUNDS.get(loss):
            cfg = cfg.model_copy(update={"clip_low": bound, "clip_high": bound})
        placed.plan = replace(placed.plan, loss_aggregation=aggregation)
        batch = batch_for(rows())
        fill(batch, reference)
        if mode != "off":
            batch.old_logprobs = None
        found[name] = Actor(placed, TEMPERATURE, cfg).deliver_update(batch)().metrics
    return found


def fill(batch: TrainBatch, reference: torch.nn.Module) -> None:
    """Fill the inputs of an update from other parts: reference logprobs, and old logprobs far enough away that clipping occurs."""
    all_rows = rows()
    for which, model in (("ref_logprobs", reference), ("old_logprobs", None)):
        values = torch.zeros(batch.token_ids.shape)
        parts = values.split(batch.lengths[batch.rows].tolist())
        for row, part in zip(batch.rows.tolist(), parts, strict=True):
            source = all_rows[row]
            found = reference_logprobs(model, row) if model else torch.tensor(source.rollout_logprobs)
            part[len(source.prompt_ids) :] = found
        setattr(batch, which, values)
    # Values outside the mask must not matter.
    assert batch.old_logprobs is not None
    batch.old_logprobs = batch.old_logprobs.masked_fill(~batch.loss_mask, float("nan"))
    AdvantageComputer(algorithm())(batch)


@lru_cache(maxsize=32)
@torch.no_grad()
def reference_logprobs(model: torch.nn.Module, row: int) -> torch.Tensor:
    """Return the reference logprobs. The model never changes, so they are cached for all updates."""
    return hf_logprobs(model, rows()[row])[0]


def update(
    path: Path,
    groups: ModelGroups,
    platform: Any,
    settings: Settings,
    reference: torch.nn.Module,
    after: dict[str, torch.Tensor] | None,
    owner: str = "spread",
    complete: Callable[[TrainBatch], None] = lambda batch: None,
) -> dict[str, Any]:
    """Run one update. Returns its metrics and the first weight that differs from the oracle. ``owner``: an entry of OWNERS."""
    built = build(path, groups, platform, settings)
    return update_of(*built, reference, after, owner, complete)


def update_of(
    model: MegatronModel,
    actor: Actor,
    reference: torch.nn.Module,
    after: dict[str, torch.Tensor] | None,
    owner: str = "spread",
    complete: Callable[[TrainBatch], None] = lambda batch: None,
) -> dict[str, Any]:
    """Run ``update`` with an existing model."""
    if owner == "learner":
        batch = batch_of_learner(actor.model)
    else:
        batch = batch_for(rows(), [dist.get_world_size() - 1] * len(rows()) if owner == "last rank" else None)
    complete(batch)
    fill(batch, reference)
    metrics = actor.deliver_update(batch)().metrics
    differences = all_gather_json("" if after is None else first_difference(gatherer(model), after, tolerance=1e-5))
    return {**metrics, "weights": any_rank(differences), "losses": all_gather_json(metrics["loss/total"])}


def twice(
    path: Path,
    groups: ModelGroups,
    platform: Any,
    settings: Settings,
    reference: torch.nn.Module,
    expected: dict[str, torch.Tensor] | None,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], str]:
    """Run two steps of some updates each. Returns their metrics, the weights, and the first weight that is wrong."""
    model, actor = build(path, groups, platform, settings)
    metrics = []
    for _ in range(2):
        batch = batch_for(rows())
        fill(batch, reference)
        metrics.append(actor.deliver_update(batch)().metrics)
    differences = all_gather_json(
        "" if expected is None else first_difference(gatherer(model), expected, tolerance=1e-5)
    )
    return metrics, dict(gatherer(model)), any_rank(differences)


def old_of_update(actor: Actor, reference: torch.nn.Module) -> dict[str, Any]:
    """Run the same update with old logprobs from a separate pass and from its own forward pass. Weights stay unchanged."""
    cfg = algorithm().model_copy(update={"rollout_correction": RolloutCorrectionConfig(mode="token", cap=0.1)})
    actor.model.optimizer = OptimizerConfig(lr=0.0)
    which, estimation, filled = Actor(actor.model, TEMPERATURE, cfg), AdvantageComputer(cfg), batch_for(rows())
    fill(filled, reference)
    found: list[tuple[torch.Tensor, dict[str, float]]] = []
    for skipped in (False, True):
        batch = batch_for(rows())
        assert which.makes_one_update(batch)
        batch.ref_logprobs = filled.ref_logprobs
        batch.old_logprobs = None if skipped else which.compute_logprobs(batch)
        metrics = estimation(batch) | which.deliver_update(batch)().metrics
        if skipped:
            batch.old_logprobs = which.logprobs_of_update(batch)
            metrics |= estimation.compare(batch)
        assert batch.old_logprobs is not None
        found.append((batch.old_logprobs, metrics))
    (computed, before), (kept, after) = found
    distance = float((computed - kept).abs().max()) if kept.numel() else 0.0
    return {"distance": max(all_gather_json(distance)), "computed": before, "skipped": after}


def small_steps(
    path: Path, groups: ModelGroups, platform: Any, dtype: str, reference: torch.nn.Module
) -> dict[str, Any]:
    """Make steps far below the resolution of 16-bit weights. They must accumulate in the fp32 masters."""
    settings = Settings(dtype=dtype, max_tokens=64, optimizer=OptimizerConfig(lr=SMALL_LR, eps=1e-8, clip_grad=1.0))
    model, actor = build(path, groups, platform, settings)
    masters = {shard.name: shard.tensors["master"] for shard in model.optimizer.shards()}
    before = {name: master.clone() for name, master in masters.items()}
    history = []
    for _ in range(NUM_SMALL_STEPS):
        batch = batch_for(rows())
        fill(batch, reference)
        history.append(actor.deliver_update(batch)().metrics)
    moved = max(float((master - before[name]).abs().max()) for name, master in masters.items())
    return {
        "losses": [metrics["loss/total"] for metrics in history],
        "skipped": sum(metrics["actor/skipped_updates"] for metrics in history),
        "grad_norm": history[-1]["actor/grad_norm"],
        "moved": max(all_gather_json(moved)),
    }


def oracle(
    path: Path,
    reference: torch.nn.Module,
    after: Path,
    extra: Callable[[torch.nn.Module], torch.Tensor] | None = None,
    drawn_logprobs: Callable[[torch.nn.Module, int], torch.Tensor] | None = None,
) -> dict[str, float]:
    """Compute the same update naively: autograd through transformers, row by row, and torch's AdamW.

    ``extra``: a loss of the model to add. ``drawn_logprobs``: logprobs of a row for the ratio, if KL and entropy use
    others. The new weights go to the directory ``after``.
    """
    hf, all_rows, cfg = load_hf(path), rows(), algorithm()
    scores = torch.tensor([row.score for row in all_rows])
    advantages = group_relative(scores, torch.arange(len(all_rows)) // 2, normalize_std=True)
    num_tokens = sum(len(row.response_ids) for row in all_rows)
    total = torch.zeros(())
    for number, (row, advantage) in enumerate(zip(all_rows, advantages, strict=True)):
        logprobs, entropy = hf_logprobs(hf, row)
        with torch.no_grad():
            ref, _ = hf_logprobs(reference, row)
        drawn = drawn_logprobs(hf, number) if drawn_logprobs is not None else logprobs
        ratio = torch.exp(drawn - torch.tensor(row.rollout_logprobs))
        clipped = torch.clamp(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
        policy = -torch.minimum(ratio * advantage, clipped * advantage)
        k3 = (torch.exp(ref - logprobs) - (ref - logprobs) - 1).clamp(max=cfg.kl.clip)
        total = total + (policy - cfg.entropy_coef * entropy + cfg.kl.coef * k3).sum() / num_tokens
    added = extra(hf) if extra is not None else torch.zeros(())
    (total + added).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.5))
    named = [
        (p.dim() == 1 or name.endswith("_bias"), p) for name, p in hf.named_parameters()
    ]  # includes biases of stacked experts
    decayed = [p for is_plain, p in named if not is_plain]
    plain = [p for is_plain, p in named if is_plain]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, betas=(0.9, 0.999)).step()
    hf.save_pretrained(after)
    return {"loss": float(total), "extra": float(added), "grad_norm": norm}
