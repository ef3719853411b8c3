"""Models with experts on every layout of experts, against transformers: logprobs, weights there and back, updates, balance."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.data.packing import balance
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.parallel.collectives import world_group
from tests.distributed import models
from tests.distributed.parity_worker import difference_from_file, distances, held_and_predicted
from tests.distributed.setting import (
    MOE_LAYOUTS,
    Settings,
    build,
    finish,
    hf_logprobs,
    load_hf,
    moe_groups_of,
    rows,
    start,
    write_together,
)
from tests.distributed.update_worker import old_of_update, oracle, small_steps, update

# Microbatches of one and of few rows; ranks have different numbers of them unless something is done about it.
CUTS = {"one/packed": (10_000, True), "many/packed": (24, True), "many/padded": (24, False)}
# The first model is cut in every way; each of the others in one that is hard.
CUTS_OF = {"qwen3_moe_mixed": tuple(CUTS), "qwen2_moe": ("many/packed",), "mixtral": ("many/padded",)}
SAVED_LAYOUTS = ("ep2_etp2_dp4", "tp2_sp_pp2_ep2_etp1")
AUX_LOSS_COEF = 1.0  # far more than anybody would take, to be seen in the gradient
BALANCED = (
    "dp4",
    "ep2_dp4",
    "tp2_sp_ep2_etp1_dp2",
    "tp2_sp_dp2",
    "pp2_ep2_dp2",
    "cp2_ep4_dp2",
    "tp2_sp_cp2_ep2_etp1",
    "tp2_sp_pp2_ep2_etp1",
    "tp4_sp_ep2_etp1",
)


def main(directory: Path, wanted: str = "") -> None:
    """``wanted``: "every cut" of every model, and nothing else."""
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {
        "parity": {},
        "gather": {},
        "names": {},
        "oracle": {},
        "updates": {},
        "balance": {},
        "precision": {},
        "old": {},
    }
    for name in models.MOE_MODELS:
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
            models.make(name, directory / f"{name}_reference", seed=7)
        dist.barrier()
        if not wanted:
            parity(name, directory, groups, platform, findings)
    for name, cuts in CUTS_OF.items():
        updates(name, directory, groups, platform, findings, tuple(CUTS) if wanted else cuts)
    if wanted:
        finish(findings, directory)
        return
    balanced_updates("qwen3_moe_mixed", directory, groups, platform, findings)
    for dtype in ("bf16", "fp16"):
        mine, reference = moe_groups_of("tp2_sp_ep2_etp1_dp2", groups), load_hf(directory / "mixtral_reference")
        findings["precision"][dtype] = small_steps(directory / "mixtral", mine, platform, dtype, reference)
    finish(findings, directory)


def parity(name: str, directory: Path, groups: dict[str, ModelGroups], platform: Any, findings: dict[str, Any]) -> None:
    path = directory / name
    with torch.no_grad():
        hf = load_hf(path)
        expected = [hf_logprobs(hf, row) for row in rows()]
    for layout in MOE_LAYOUTS:
        model, actor = build(path, moe_groups_of(layout, groups), platform, Settings())
        for packing in (True, False):
            key = f"{name}/{layout}/{'packed' if packing else 'padded'}"
            findings["parity"][key] = distances(actor, packing, expected)
        findings["gather"][f"{name}/{layout}"] = difference_from_file(model, path)
        findings["names"][f"{name}/{layout}"] = held_and_predicted(model)
        if layout in SAVED_LAYOUTS:
            exporter = Exporter(
                model.local_parameters(),
                model.spec.geometry,
                [str(path)],
                world_group(),
                bucket_bytes=10_000,
                shard_bytes=60_000,
            )
            write_together(exporter, directory / f"{name}_{layout}_saved")


def updates(
    name: str,
    directory: Path,
    groups: dict[str, ModelGroups],
    platform: Any,
    findings: dict[str, Any],
    cuts: tuple[str, ...],
) -> None:
    path, reference = directory / name, load_hf(directory / f"{name}_reference")
    if dist.get_rank() == 0:
        findings["oracle"][name] = oracle(path, reference, directory / f"{name}_after")
    dist.barrier()
    after = load_file(directory / f"{name}_after" / "model.safetensors")
    for layout in MOE_LAYOUTS:
        for cut in cuts:
            max_tokens, packing = CUTS[cut]
            settings = Settings(
                max_tokens=max_tokens, packing=packing, logit_chunk_tokens=5 if max_tokens == 24 else None
            )
            found = update(path, moe_groups_of(layout, groups), platform, settings, reference, after)
            findings["updates"][f"{name}/{layout}/{cut}"] = found
        if name == "qwen2_moe":
            _, actor = build(path, moe_groups_of(layout, groups), platform, Settings(max_tokens=24))
            findings["old"][layout] = old_of_update(actor, reference)


def balanced_updates(
    name: str, directory: Path, groups: dict[str, ModelGroups], platform: Any, findings: dict[str, Any]
) -> None:
    """With the load-balancing loss: every data-parallel rank has one microbatch, whose loss the oracle writes down."""
    path, reference = directory / name, load_hf(directory / f"{name}_reference")
    for dp in (1, 2, 4):
        if dist.get_rank() == 0:
            after = directory / f"{name}_balanced{dp}"
            findings["oracle"][f"balanced/{dp}"] = oracle(path, reference, after, partial(balance_loss, dp))
    dist.barrier()
    for layout in BALANCED:
        mine = moe_groups_of(layout, groups)
        after = load_file(directory / f"{name}_balanced{mine.layout.dp}" / "model.safetensors")
        for kind, packing, recompute in (
            ("packed", True, None),
            ("padded", False, None),
            ("recomputed", True, RecomputeConfig("full", "uniform", 1)),
        ):
            settings = Settings(max_tokens=10_000, packing=packing, recompute=recompute, aux_loss_coef=AUX_LOSS_COEF)
            found = update(path, mine, platform, settings, reference, after)
            findings["balance"][f"{layout}/{kind}"] = {**found, "dp": mine.layout.dp}


def balance_loss(dp: int, hf: torch.nn.Module) -> torch.Tensor:
    """E * sum_e f_e P_e of each rank's rows and layer, weighted by tokens, from the router logits that transformers gives."""
    all_rows, top_k, num_experts = rows(), hf.config.num_experts_per_tok, hf.config.num_local_experts
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in all_rows]
    total = torch.zeros(())
    for mine in balance(lengths, dp):
        by_row = [
            hf(
                torch.tensor([all_rows[i].prompt_ids + all_rows[i].response_ids]), output_router_logits=True
            ).router_logits
            for i in mine
        ]
        for layer in zip(*by_row, strict=True):
            p = torch.softmax(torch.cat(layer), dim=-1)
            chosen = torch.zeros_like(p).scatter(1, p.topk(top_k).indices, 1.0)
            fractions = chosen.sum(0) / (top_k * len(p))
            total = total + len(p) * num_experts * (fractions * p.mean(0)).sum()
    return AUX_LOSS_COEF * total / sum(lengths)
