"""Every family against transformers on every kind of layout: logprobs and entropy, padded and packed, and saved directories."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.map.layouts import stage_names
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
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import (
    CONTEXT_LAYOUTS,
    TEMPERATURE,
    Settings,
    batch_for,
    build,
    finish,
    gatherer,
    groups_of,
    hf_logprobs,
    layouts_of,
    load_hf,
    response_values,
    rows,
    start,
    write_together,
)

SAVED_LAYOUTS = ("dp4", "tp2_pp2_vpp2_sp", "pp4", "tp2_pp2_vpp2_sp_uneven")
# Biases, tied embeddings and shared keys on every layout. What the other families add (norms, rotary scaling) depends on the
# kinds of cuts, not on how many there are; they are on every layout with -m matrix.
EVERYWHERE = ("qwen2", "qwen3_tied", "qwen3_seven")


def layouts_for(model: str) -> list[str]:
    """The layouts on which a model is compared."""
    few = ["dp4", "tp2_pp2_vpp2_sp", "tp4_sp", "pp4"]
    shared = (
        [*CONTEXT_LAYOUTS] if model == "qwen3_tied" else ["tp2_sp_cp2"] if "rope" in model or "yarn" in model else []
    )
    return [*(layouts_of(model) if model in EVERYWHERE else few), *shared]


def all_layouts(model: str) -> list[str]:
    """The whole matrix. Those of context parallelism have stages of four layers."""
    return [*layouts_of(model), *([] if model == "qwen3_seven" else CONTEXT_LAYOUTS)]


def main(directory: Path, wanted: str = "") -> None:
    """``wanted`` names a model that is compared on every layout; without, all are on theirs."""
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {"parity": {}, "gather": {}, "names": {}, "collectives": collectives()}
    for name in [wanted] if wanted else models.MODELS:
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
        dist.barrier()
        all_rows = rows()
        with torch.no_grad():
            expected = [hf_logprobs(load_hf(path), row) for row in all_rows]
        for layout in all_layouts(name) if wanted else layouts_for(name):
            mine = groups_of(layout, groups)
            model, actor = build(path, mine, platform, Settings())
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
                for kind in ("first", "saved"):  # an exporter writes again and again
                    write_together(exporter, directory / f"{name}_{layout}_{kind}")
    finish(findings, directory)


def distances(actor: Actor, packing: bool, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """How far the actor's logprobs and entropies are at most, over all ranks, from those expected of each row."""
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
    """The first gathered tensor that is not the file's, bit for bit, or is missing; "" on all ranks if there is none."""
    return any_rank(all_gather_json(first_difference(gatherer(model), load_file(path / "model.safetensors"))))


def held_and_predicted(model: MegatronModel) -> list[list[list[str]]]:
    """Of each rank the names of its parameters, and those that the layout gives it: what plans without a model assume."""
    groups = model.groups
    predicted = stage_names(model.spec.geometry, groups.layout)[groups.pp_rank]
    return all_gather_json([sorted(p.name for p in model.local_parameters()), sorted(predicted)])


def collectives() -> dict[str, Any]:
    """Small ones, with a different amount on every rank."""
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
    """What ranks read in the memory of the next one, after it has changed, and who can read theirs."""
    mapped = share_memory(3 * rank, [(rank + 1) % 4], world_group())
    mapped.own.fill_(rank + 10)
    dist.barrier()
    return all_gather_json([{r: memory.tolist() for r, memory in mapped.of.items()}, sorted(mapped.readers)])
