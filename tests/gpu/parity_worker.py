"""Compare logprobs of small models on one GPU with transformers on the host."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.parallel.layout import ParallelLayout
from tests.distributed import models
from tests.distributed.setting import (
    Settings,
    batch_for,
    build,
    finish,
    hf_logprobs,
    load_hf,
    response_values,
    rows,
    start,
)


def main(directory: Path) -> None:
    platform = start()
    torch.backends.cuda.matmul.allow_tf32 = False
    groups = build_groups(ParallelLayout(1))
    assert groups is not None
    findings = {}
    for name in ("llama", "qwen2", "qwen3_tied"):
        path = directory / name
        models.make(name, path)
        with torch.no_grad():
            expected = [hf_logprobs(load_hf(path), row) for row in rows()]
        _, actor = build(path, groups, platform, Settings())
        for packing in (True, False):
            actor.model.trainer.packing = packing
            batch = batch_for(rows())
            logprobs = actor.compute_logprobs(batch)
            found = response_values(batch, logprobs)
            worst = max(float((torch.tensor(found[row]) - expected[row][0]).abs().max()) for row in found)
            findings[f"{name}/{'packed' if packing else 'padded'}"] = worst
    finish(findings, directory)
