"""Compare further families on a few layouts with transformers: logprobs, loaded and saved weights, and one update."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.bridge.files.carried import CarriedTensors
from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.families import has_expert_bias
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from tests.difference import first_difference
from tests.distributed import models
from tests.distributed.parity_worker import difference_from_file, distances, held_and_predicted
from tests.distributed.setting import (
    CONTEXT_LAYOUTS,
    LAYOUTS,
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
    write_together,
)
from tests.distributed.update_worker import oracle, update

BIAS_RATE = 0.01
WITH_MTP = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # their files contain MTP layers, which are not trained here
# The update of a model is tested on its first layout. FAMILY=name runs the models whose names start with it.
FEW = {
    "deepseek_v3": ("tp2_sp_cp2_ep2_etp1", "tp2_sp_pp2_ep2_etp1"),
    "deepseek_v32": ("tp2_sp_cp2_ep2_etp1", "tp2_sp_pp2_ep2_etp1", "cp4_ep2"),
    "deepseek_v3_direct": ("pp2_ep2_dp2_uneven", "cp4_ep2"),
    "glm4_moe": ("tp2_sp_pp2_ep2_etp1", "pp2_cp2_ep2"),
    "deepseek_v3_dense": ("tp2_pp2", "tp2_cp2"),  # without sequence parallelism
    "deepseek_v2": ("tp2_sp_pp2_ep2_etp1",),
    "olmo2": ("tp2_pp2", "tp4_sp"),
    "gpt_oss": ("tp2_sp_pp2_ep2_etp1", "cp4_ep2"),
    "qwen3_next": ("tp2_sp_cp2_ep2_etp1", "tp4_sp_ep2_etp1", "pp2_ep2_dp2_uneven"),
    "qwen3_5_text": ("dp4", "tp2_cp2", "pp2_cp2", "cp4"),  # without sequence parallelism
    "qwen3_5_moe_text": ("cp4_ep2",),
    "gemma3_text": ("tp2_pp2_vpp2_sp", "tp2_cp2"),
    "glm_moe_dsa": ("tp2_sp_cp2_ep2_etp1", "tp2_sp_pp2_ep2_etp1", "cp4_ep2"),
    "gemma4_text": ("tp2_pp2_vpp2_sp", "tp4", "tp2_cp2"),
    "gemma4_text_moe": ("tp2_sp_pp2_ep2_etp1", "ep2_etp2_dp4", "cp4_ep2"),
    "glm4_moe_lite": ("tp2_sp_pp2_ep2_etp1", "cp4_ep2"),
    "minimax_m2": ("tp2_sp_cp2_ep2_etp1", "tp4_sp_ep2_etp1", "pp2_ep2_dp2_uneven"),
    "olmoe": ("pp2_cp2_ep2",),
    "olmo3": ("tp2_pp2_vpp2_sp", "tp2_cp2"),
    "seed_oss": ("tp2_pp2",),
    "ernie4_5": ("tp2_cp2",),
    "smollm3": ("tp2_pp2_vpp2_sp", "pp2_cp2"),
    "exaone4": ("tp2_pp2_vpp2_sp", "tp2_cp2"),
    "exaone4_full": ("pp2_cp2",),
    "phi3": ("tp2_pp2_vpp2_sp", "tp2_cp2"),
    "glm4": ("tp2_pp2", "tp2_cp2"),
    "nemotron_h": ("tp2_sp_cp2_ep2_etp1", "tp4_sp_ep2_etp1", "tp2_sp_pp2_ep2_etp1", "cp4_ep2"),
    "nemotron_h_dense": ("tp2_pp2", "cp4", "pp2_vpp2_cp2"),  # without sequence parallelism
}
if only := os.environ.get("FAMILY"):
    FEW = {name: layouts for name, layouts in FEW.items() if name.startswith(only)}

# These are updated on each of their layouts, so that all metrics are compared. Under these two, sequences are padded.
SHARED, PADDED = ("qwen3_5_text",), ("pp2_ep2_dp2_uneven", "cp4")


def layouts_of(model: str) -> tuple[str, ...]:
    """Return all layouts of a model. Experts with biases are whole on a rank, and so is a key head (Qwen3.5 has two here)."""
    if not set(FEW.get(model, ())) <= set(MOE_LAYOUTS):
        return tuple({**LAYOUTS, **CONTEXT_LAYOUTS})
    return tuple(
        name
        for name, (tp, _, _, _, _, etp, *_) in MOE_LAYOUTS.items()
        if (model != "gpt_oss" or (etp or tp) == 1) and (model != "qwen3_5_moe_text" or tp <= 2)
    )


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {"oracle": {}}
    for name in FEW:
        path, after = directory / name, directory / f"{name}_after"
        if dist.get_rank() == 0:
            models.make(name, path)
            reference = models.make(name, directory / f"{name}_reference", seed=7)
            findings["oracle"][name] = oracle(path, reference, after)
            shutil.copytree(path, source := directory / f"{name}_source")
            if name in WITH_MTP:
                models.add_mtp_layer(source)
        dist.barrier()
        hf, reference = load_hf(path), load_hf(directory / f"{name}_reference")
        with torch.no_grad():
            expected = [hf_logprobs(hf, row) for row in rows()]
        for layout in FEW[name]:
            mine = (moe_groups_of if layout in MOE_LAYOUTS else groups_of)(layout, groups)
            model, actor = build(path, mine, platform, Settings())
            found = findings[f"{name}/{layout}"] = {
                "parity": {kind: distances(actor, kind == "packed", expected) for kind in ("packed", "padded")},
                "gather": difference_from_file(model, path),
                "names": held_and_predicted(model),
            }
            if layout == FEW[name][0] or name in SHARED:
                source, saved = directory / f"{name}_source", directory / f"{name}_{layout}_saved"
                geometry = model.spec.geometry
                exporter = Exporter(
                    model.local_parameters(),
                    geometry,
                    [str(source)],
                    world_group(),
                    bucket_bytes=80_000 if name == "gpt_oss" else 10_000,  # fits one of four experts of 65,536 bytes
                    shard_bytes=100_000,
                    carried=CarriedTensors(source),
                )
                write_together(exporter, saved)
                found["assembled"] = max(all_gather_json(exporter.assembled_bytes))
                found["saved"] = difference(saved, source)
                weights = load_file(after / "model.safetensors") | moved_biases(hf)
                rate = BIAS_RATE if has_expert_bias(geometry) else 0.0
                settings = Settings(max_tokens=24, packing=layout not in PADDED, expert_bias_rate=rate)
                found["update"] = update(path, mine, platform, settings, reference, weights)
    finish(findings, directory)


def moved_biases(hf: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the expert biases after an update. Each moves towards the mean, by the tokens of all rows that transformers routed."""
    counts, moved = {}, {}
    routers = {name: module for name, module in hf.named_modules() if hasattr(module, "e_score_correction_bias")}
    for name, router in routers.items():
        counts[name] = torch.zeros_like(router.e_score_correction_bias)

        def count(module: torch.nn.Module, inputs: Any, outputs: Any, name: str = name) -> None:
            counts[name] += torch.bincount(outputs[2].flatten(), minlength=len(counts[name]))

        getattr(router, "gate", router).register_forward_hook(count)  # in MiniMax-M2, the bias is outside of the router
    for row in rows():
        with torch.no_grad():
            hf(torch.tensor([row.prompt_ids + row.response_ids]))
    for name, router in routers.items():
        direction = torch.sign(counts[name].mean() - counts[name])
        assert direction.unique().numel() > 1, "some experts have more tokens than others"
        in_file = f"{name}.e_score_correction_bias".replace(".mlp.e_score", ".block_sparse_moe.e_score")  # MiniMax-M2
        in_file = in_file.replace("model.", "backbone.") if ".mixer." in name else in_file  # Nemotron-H
        moved[in_file] = router.e_score_correction_bias + BIAS_RATE * direction
    return moved


def difference(saved: Path, path: Path) -> str:
    """Return the first tensor that differs between two directories, as files and as transformers loads them."""
    files = {key: tensor for file in saved.glob("*.safetensors") for key, tensor in load_file(file).items()}
    return first_difference(files, load_file(path / "model.safetensors")) or first_difference(
        load_hf(saved).state_dict(), load_hf(path).state_dict()
    )
