"""Compare MoE models on every layout of experts with transformers: logprobs, loaded and saved weights, updates, balance."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.config.schema import RecomputeConfig, TrainerConfig
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles.model import RoleModel
from tests.covering import covering_rows
from tests.distributed import models
from tests.distributed.parity_worker import difference_from_file, distances, held_and_predicted
from tests.distributed.setting import (
    MOE_LAYOUTS,
    Settings,
    batch_for,
    build,
    finish,
    hf_logprobs,
    load_hf,
    moe_groups_of,
    rows,
    splits_of,
    start,
    write_together,
)
from tests.distributed.update_worker import old_of_update, oracle, small_steps, update, update_of

# Microbatches of one and of few rows. Without equalisation, ranks would have different numbers of microbatches.
CUTS = {"one/packed": (10_000, True), "many/packed": (24, True), "many/padded": (24, False)}
OLD_LAYOUTS = ("ep2_etp2_dp4", "tp2_sp_ep2_etp1_dp2", "pp2_vpp2_ep2_dp2", "cp4_ep2")
AUX_LOSS_COEF = 1.0  # much larger than in practice, to be visible in the gradient
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
BALANCE_KINDS = {
    "packed": (True, None),
    "padded": (False, None),
    "recomputed": (True, RecomputeConfig(granularity="full", num_layers=1)),
}


def cells() -> list[dict[str, str]]:
    """Return model, layout and cut of the updates. Every layout occurs, and each kind of split with each model and cut."""
    factors = {"model": tuple(models.MOE_MODELS), "layout": tuple(MOE_LAYOUTS), "cut": tuple(CUTS)}
    return covering_rows(factors, features=lambda row: {**row, **splits_of(row["layout"]), "layout": None})


def balanced_cells() -> list[dict[str, str]]:
    """Return layout and kind of the updates with a load-balancing loss."""
    factors = {"layout": BALANCED, "kind": tuple(BALANCE_KINDS)}
    return covering_rows(factors, features=lambda row: {**splits_of(row["layout"]), "kind": row["kind"]})


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {"cells": {}, "oracle": {}, "balance": {}, "precision": {}, "old": {}}
    for name in models.MOE_MODELS:
        path, reference = directory / name, directory / f"{name}_reference"
        if dist.get_rank() == 0:
            models.make(name, path)
            findings["oracle"][name] = oracle(path, models.make(name, reference, seed=7), directory / f"{name}_after")
        dist.barrier()
        check_cells(name, directory, groups, platform, findings["cells"])
    reference = load_hf(directory / "qwen2_moe_reference")
    for layout in OLD_LAYOUTS:
        made = moe_groups_of(layout, groups)
        _, actor = build(directory / "qwen2_moe", made, platform, Settings(max_tokens=24))
        findings["old"][layout] = old_of_update(actor, reference)
    balanced_updates("qwen3_moe_mixed", directory, groups, platform, findings)
    for dtype in ("bf16", "fp16"):
        mine, reference = moe_groups_of("ep2_dp4", groups), load_hf(directory / "mixtral_reference")
        findings["precision"][dtype] = small_steps(directory / "mixtral", mine, platform, dtype, reference)
    finish(findings, directory)


def check_cells(name: str, directory: Path, groups: dict[str, ModelGroups], platform: Any, found: Any) -> None:
    """Check a model: logprobs, loaded and saved weights, names of parameters, a saved directory, and an update."""
    path, reference = directory / name, load_hf(directory / f"{name}_reference")
    after = load_file(directory / f"{name}_after" / "model.safetensors")
    with torch.no_grad():
        hf = load_hf(path)
        expected = [hf_logprobs(hf, row) for row in rows()]
    for cell in cells():
        if cell["model"] != name:
            continue
        key = "/".join(cell.values())
        max_tokens, packing = CUTS[cell["cut"]]
        settings = Settings(max_tokens=max_tokens, packing=packing, logit_chunk_tokens=5 if max_tokens == 24 else None)
        model, actor = build(path, moe_groups_of(cell["layout"], groups), platform, settings)
        found[key] = {
            "parity": distances(actor, packing, expected),
            "gather": difference_from_file(model, path),
            "names": held_and_predicted(model),
        }
        exporter = Exporter(
            model.local_parameters(),
            model.spec.geometry,
            [str(path)],
            world_group(),
            bucket_bytes=10_000,
            shard_bytes=60_000,
        )
        write_together(exporter, directory / f"{key.replace('/', '_')}_saved")
        found[key]["update"] = update_of(model, actor, reference, after)


def balanced_updates(
    name: str, directory: Path, groups: dict[str, ModelGroups], platform: Any, findings: dict[str, Any]
) -> None:
    """Update with the load-balancing loss. Every data-parallel rank has one microbatch, whose loss the oracle computes explicitly."""
    path, reference = directory / name, load_hf(directory / f"{name}_reference")
    spec = load_spec(path)
    for dp, packing in product((1, 2, 4), (True, False)):
        if dist.get_rank() == 0:  # packed rows of a prompt are in one microbatch
            role = RoleModel(ParallelLayout(dp), None, spec, TrainerConfig(packing=packing))
            shares, after = role.deal(batch_for(rows())), directory / f"{name}_{dp}_{packing}"
            findings["oracle"][f"balanced/{dp}/{packing}"] = oracle(
                path, reference, after, partial(balance_loss, shares)
            )
    dist.barrier()
    for cell in balanced_cells():
        mine = moe_groups_of(cell["layout"], groups)
        packing, recompute = BALANCE_KINDS[cell["kind"]]
        after = load_file(directory / f"{name}_{mine.layout.dp}_{packing}" / "model.safetensors")
        settings = Settings(max_tokens=10_000, packing=packing, recompute=recompute, aux_loss_coef=AUX_LOSS_COEF)
        found = update(path, mine, platform, settings, reference, after)
        findings["balance"]["/".join(cell.values())] = {**found, "oracle": f"balanced/{mine.layout.dp}/{packing}"}


def balance_loss(shares: list[list[int]], hf: torch.nn.Module) -> torch.Tensor:
    """Return E * sum_e f_e P_e for each rank's rows and layer, weighted by tokens, from the router logits of transformers."""
    all_rows, top_k, num_experts = rows(), hf.config.num_experts_per_tok, hf.config.num_local_experts
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in all_rows]
    total = torch.zeros(())
    for mine in shares:
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
