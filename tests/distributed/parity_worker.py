"""Compare every family on every kind of layout with transformers: logprobs and entropy, padded and packed, and saved directories."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.run.transports import share_memory
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.collectives import (
    all_gather_json,
    all_gather_rows,
    broadcast_json,
    gather_json,
    reduce_sums,
    world_group,
)
from rlhf_mcore.roles.policy import Actor
from tests.covering import covering_rows
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import (
    CONTEXT_LAYOUTS,
    LAYOUTS,
    TEMPERATURE,
    UNEVEN_LAYOUTS,
    Settings,
    batch_for,
    build,
    finish,
    gatherer,
    groups_of,
    hf_logprobs,
    load_hf,
    response_values,
    rows,
    splits_of,
    start,
    write_together,
)
from tests.trainer_layout import stage_names


def cells() -> list[dict[str, str]]:
    """Return models and layouts. Every layout occurs, and each kind of split with each model."""
    factors = {"model": tuple(models.MODELS), "layout": [*LAYOUTS, *CONTEXT_LAYOUTS, *UNEVEN_LAYOUTS]}
    return covering_rows(
        factors,
        lambda row: (row["layout"] in UNEVEN_LAYOUTS) == (row["model"] == "qwen3_seven"),
        lambda row: {**splits_of(row["layout"]), "model": row["model"]},
    )


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {"cells": {}, "collectives": collectives()}
    for name in models.MODELS:
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
        dist.barrier()
        hf, all_rows = load_hf(path), rows()
        with torch.no_grad():
            expected = [hf_logprobs(hf, row) for row in all_rows]
        for layout in [cell["layout"] for cell in cells() if cell["model"] == name]:
            model, actor = build(path, groups_of(layout, groups), platform, Settings())
            findings["cells"][f"{name}/{layout}"] = {
                "parity": {kind: distances(actor, kind == "packed", expected) for kind in ("packed", "padded")},
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
            for kind in ("first", "saved"):  # an exporter can write repeatedly
                write_together(exporter, directory / f"{name}_{layout}_{kind}")
    finish(findings, directory)


def distances(actor: Actor, packing: bool, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Return the largest errors of the actor's logprobs and entropies over all ranks and rows."""
    placed = actor.model
    assert placed.model is not None
    placed.trainer.packing = packing
    batch = batch_for(rows())
    compute = partial(placed.model.logprobs_and_entropy, temperature=TEMPERATURE)
    worst = [0.0, 0.0]
    for which in (0, 1):
        values = placed.per_token(batch, lambda logits, part, which=which: compute(logits, part)[which])
        for row, found in response_values(batch, values).items():
            worst[which] = max(worst[which], float((torch.tensor(found) - expected[row][which]).abs().max()))
    return [max(column) for column in zip(*all_gather_json(worst), strict=True)]


def difference_from_file(model: MegatronModel, path: Path) -> str:
    """Return the first gathered tensor that is missing or differs from the file in a bit; "" on all ranks if there is none."""
    return any_rank(all_gather_json(first_difference(gatherer(model), load_file(path / "model.safetensors"))))


def held_and_predicted(model: MegatronModel) -> list[list[list[str]]]:
    """Return for each rank the names of its parameters, and the names that plans without a model derive from the layout."""
    groups = model.groups
    predicted = stage_names(model.spec.geometry, groups.layout)[groups.pp_rank]
    return all_gather_json([sorted(p.name for p in model.local_parameters()), sorted(predicted)])


def collectives() -> dict[str, Any]:
    """Run small collectives with different amounts on every rank."""
    rank = dist.get_rank()
    return {
        "gather_rows": all_gather_rows(torch.full((rank, 2), rank)).tolist(),
        "gather_json": gather_json({"rank": rank, "text": "ü" * rank}),
        "all_gather_json": all_gather_json([rank] * rank),
        "broadcast_json": broadcast_json({"from": rank}, 2),
        "reduce_sums": reduce_sums({"a": float(rank), "b_max": float(-rank)}),
        "shared": shared_memory(rank),
    }


def shared_memory(rank: int) -> list[Any]:
    """Return the values that ranks read from the changed memory of the next rank, and the ranks that can read theirs."""
    mapped = share_memory(3 * rank, [(rank + 1) % 4], world_group())
    mapped.own.fill_(rank + 10)
    dist.barrier()
    return all_gather_json([{r: memory.tolist() for r, memory in mapped.of.items()}, sorted(mapped.readers)])
