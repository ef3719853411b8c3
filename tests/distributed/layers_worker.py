"""The checks of the default tier on four ranks: one model per kind of layer, on few layouts that contain every kind of split."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.data.prefixes import PrefixTree, build_tree
from rlhf_mcore.families import has_expert_bias
from rlhf_mcore.mcore.groups import ModelGroups
from tests.distributed import models
from tests.distributed.family_worker import BIAS_RATE, moved_biases
from tests.distributed.parity_worker import difference_from_file, distances, held_and_predicted
from tests.distributed.setting import (
    MOE_LAYOUTS,
    Settings,
    build,
    finish,
    groups_of,
    hf_logprobs,
    load_hf,
    moe_groups_of,
    rows,
    start,
)
from tests.distributed.state_worker import World, circle
from tests.distributed.update_worker import old_of_update, oracle, update_of

KINDS = {
    "dense": "qwen2",
    "experts": "qwen2_moe",
    "latent attention": "deepseek_v3",
    "delta net": "qwen3_5_text",
    "state space": "nemotron_h",
}
# Layout, tokens per microbatch, packing, and ownership of rows.
CELLS = {
    "dense": (
        ("dp4", 24, True, "learner"),
        ("tp2_dp2_sp", 10_000, True, "spread"),
        ("tp2_pp2_vpp2_sp", 24, False, "last rank"),
        ("pp2_cp2", 24, True, "spread"),
        ("cp4", 24, False, "spread"),
    ),
    "experts": (
        ("ep2_etp2_dp4", 24, False, "spread"),
        ("tp2_sp_ep2_etp1_dp2", 24, True, "learner"),
        ("pp2_cp2_ep2", 24, True, "last rank"),
    ),
    "latent attention": (
        ("tp2_sp_cp2_ep2_etp1", 24, True, "spread"),
        ("pp2_ep2_dp2_uneven", 24, False, "last rank"),
    ),
    "delta net": (("tp2_cp2", 24, True, "spread"), ("pp2_dp2", 24, False, "learner")),
    "state space": (("tp2_sp_cp2_ep2_etp1", 24, True, "spread"), ("pp2_ep2_dp2", 24, False, "learner")),
}
WITH_BIASES = ("latent attention", "state space")  # experts have them
CIRCLES = {
    "qwen3_tied": ("tp2_cp2", "pp2_vpp2_dp2", "tp2_cp2"),
    "qwen3_moe": ("tp2_sp_ep2_etp1_dp2", "pp2_ep2_dp2", "tp2_sp_ep2_etp1_dp2"),
    "nemotron_h": ("tp2_sp_ep2_etp1_dp2", "pp2_ep2_dp2", "tp2_sp_ep2_etp1_dp2"),
}


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {kind: {"cells": {}} for kind in KINDS}
    for kind, name in KINDS.items():
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
            reference = models.make(name, directory / f"{name}_reference", seed=7)
            findings[kind]["oracle"] = oracle(path, reference, directory / f"{name}_after")
        dist.barrier()
        check_cells(kind, directory, groups, platform, findings[kind]["cells"])
    world = World(directory, CIRCLES)
    findings["circles"] = {name: circle(world, name, layouts) for name, layouts in CIRCLES.items()}
    _, actor = build(directory / "qwen2", groups_of("pp2_cp2", groups), platform, Settings(max_tokens=24))
    findings["old"] = old_of_update(actor, load_hf(directory / "qwen2_reference"))
    findings["broken"] = of_broken_trees(directory / "qwen2", groups, platform)
    finish(findings, directory)


def of_broken_trees(path: Path, groups: dict[str, ModelGroups], platform: Any) -> dict[str, float]:
    """Compute logprobs over prefix trees with one fault each. Returns their differences from transformers."""

    def change(tree: PrefixTree, how: str) -> None:
        if how == "positions from 0":
            tree.positions = torch.cat([torch.arange(size) for size in tree.sizes])
        elif how == "predictor one off":
            tree.sources = (tree.sources - 1).clamp(min=0)
        for segment in tree.segments:
            if how == "no ancestors":
                segment.parent, segment.end = -1, segment.begin + segment.size
            elif how == "root's keys left out" and segment.parent < 0:
                segment.end = segment.begin + segment.size

    hf, found = load_hf(path), {}
    with torch.no_grad():
        expected = [hf_logprobs(hf, row) for row in rows()]
    _, actor = build(path, groups_of("dp4", groups), platform, Settings(max_tokens=10_000))
    for how in ("no ancestors", "positions from 0", "predictor one off", "root's keys left out"):

        def broken(*args: Any, how: str = how, **kwargs: Any) -> PrefixTree | None:
            if (tree := build_tree(*args, **kwargs)) is not None:
                change(tree, how)
            return tree

        with patch("rlhf_mcore.data.collate.build_tree", broken):
            found[how] = distances(actor, True, expected)[0]
    return found


def check_cells(kind: str, directory: Path, groups: dict[str, ModelGroups], platform: Any, found: Any) -> None:
    """Check a model: logprobs, loaded and saved weights, names of parameters, and an update."""
    path = directory / KINDS[kind]
    hf, reference = load_hf(path), load_hf(directory / f"{KINDS[kind]}_reference")
    with torch.no_grad():
        expected = [hf_logprobs(hf, row) for row in rows()]
    after = load_file(directory / f"{KINDS[kind]}_after" / "model.safetensors") | moved_biases(hf)
    for layout, max_tokens, packing, owner in CELLS[kind]:
        settings = Settings(max_tokens=max_tokens, packing=packing, logit_chunk_tokens=5 if max_tokens == 24 else None)
        settings.expert_bias_rate = BIAS_RATE if kind in WITH_BIASES else 0.0
        made = (moe_groups_of if layout in MOE_LAYOUTS else groups_of)(layout, groups)
        model, actor = build(path, made, platform, settings)
        assert has_expert_bias(model.spec.geometry) == (kind in WITH_BIASES)
        found[layout] = {
            "parity": {"packed" if packing else "padded": distances(actor, packing, expected)},
            "gather": difference_from_file(model, path),
            "names": held_and_predicted(model),
            "update": update_of(model, actor, reference, after, owner),
        }
