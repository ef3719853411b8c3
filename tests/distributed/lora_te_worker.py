"""Compare adapters of Transformer Engine's layers, computed by torch, with PEFT or the formula, as in lora_worker.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

LAYOUTS = {
    "qwen3": ("tp2_pp2",),
    "qwen3_pissa": ("tp2_dp2_sp",),
    "qwen2": ("tp2_dp2_sp",),
    "qwen3_dora": ("tp2_dp2",),
    "qwen2_dora": ("tp2_dp2_sp",),
    "deepseek_v3_dense_dora": ("tp2_dp2",),
    "qwen3_moe": ("tp2_sp_ep2_etp1_dp2", "ep2_etp2_dp4"),
    "deepseek_v3_kimi": ("tp2_sp_ep2_etp1_dp2",),
}
BEGINNING = "grown"  # B is not zero


def preload(directory: str, folder: str) -> None:
    """Import Transformer Engine, and then Megatron, before the ranks are forked."""
    from tests.processes.mcore.transformer_engine_worker import import_transformer_engine

    import_transformer_engine(folder)
    from tests.distributed.transformer_engine_math import use_torch

    use_torch()
    from tests.distributed import lora_worker  # noqa: F401


def main(directory: Path, folder: Path) -> None:
    if "transformer_engine" not in sys.modules:
        preload(str(directory), str(folder))
    import torch.distributed as dist

    from rlhf_mcore.mcore import layers
    from tests.distributed import lora_worker, models
    from tests.distributed.setting import MOE_LAYOUTS, finish, groups_of, moe_groups_of, start

    assert layers.HAVE_TE
    platform, groups, findings = start(), dict[str, Any](), dict[str, Any](oracle={}, updates={})
    for name, layouts in LAYOUTS.items():
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name.removesuffix("_pissa").removesuffix("_dora"), path)
            findings["oracle"][name] = lora_worker.oracle(name, path, BEGINNING)
        dist.barrier()
        for layout in layouts:
            made = (moe_groups_of if layout in MOE_LAYOUTS else groups_of)(layout, groups)
            findings["updates"][f"{name}/{layout}"] = lora_worker.update(
                name, path, made, platform, BEGINNING, layer_spec="auto"
            )
    finish(findings, directory)
