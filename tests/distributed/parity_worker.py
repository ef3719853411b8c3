"""Every family on every layout against transformers: logprobs and entropy, padded and packed, and the way back to a directory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.hf_files import HFReader
from rlhf_mcore.bridge.transfer import save
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_rows, broadcast_json, gather_json, reduce_sums
from tests.distributed import models
from tests.distributed.setting import (
    LAYOUTS,
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
    start,
)


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {"parity": {}, "gather": {}, "collectives": collectives()}
    for name in models.MODELS:
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
        dist.barrier()
        all_rows = rows()
        with torch.no_grad():
            expected = [hf_logprobs(load_hf(path), row) for row in all_rows]
        for layout in LAYOUTS:
            mine = groups_of(layout, groups)
            model, actor = build(path, mine, platform, Settings())
            for packing in (True, False):
                actor.trainer.packing = packing
                batch = batch_for(all_rows, mine.dp_rank, mine.layout.dp)
                logprobs, entropy = actor.compute_logprobs(batch)
                worst = [0.0, 0.0]
                for which, values in enumerate((logprobs, entropy)):
                    for row, found in response_values(batch, values).items():
                        worst[which] = max(worst[which], float((torch.tensor(found) - expected[row][which]).abs().max()))
                key = f"{name}/{layout}/{'packed' if packing else 'padded'}"
                findings["parity"][key] = [max(column) for column in zip(*all_gather_json(worst), strict=True)]
            findings["gather"][f"{name}/{layout}"] = gathered_equals_file(model, path)
        if name in ("qwen2", "qwen3"):
            save(gatherer(model), directory / f"{name}_saved", companions_from=str(path))
            dist.barrier()
    finish(findings, directory)


def gathered_equals_file(model: Any, path: Path) -> bool:
    """Every gathered tensor is the file's, bit for bit, and none is missing."""
    reader, names = HFReader(path), set()
    equal = True
    for name, tensor in gatherer(model):
        names.add(name)
        equal &= torch.equal(tensor, reader.read(name, tuple(slice(None) for _ in tensor.shape)))
    return all(all_gather_json(equal and names == reader.names))


def collectives() -> dict[str, Any]:
    """Small ones, with a different amount on every rank."""
    rank = dist.get_rank()
    return {
        "gather_rows": all_gather_rows(torch.full((rank, 2), rank)).tolist(),
        "gather_json": gather_json({"rank": rank, "text": "ü" * rank}),
        "all_gather_json": all_gather_json([rank] * rank),
        "broadcast_json": broadcast_json({"from": rank}, 2),
        "reduce_sums": reduce_sums({"a": float(rank), "b_max": float(-rank)}),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
