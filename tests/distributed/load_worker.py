"""Open a model directory on four ranks, and count which rank reads the index and looks at the files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rlhf_mcore.bridge.files import hf_files
from rlhf_mcore.bridge.files.hf_files import INDEX, HFReader, locate_tensors
from rlhf_mcore.parallel.collectives import all_gather_json
from tests.distributed.setting import finish, start

FILES = 6


def main(directory: Path) -> None:
    start()
    if dist.get_rank() == 0:
        for k in range(FILES):
            save_file({f"tensor{k}": torch.full((2, 3), float(k))}, directory / f"model-{k}.safetensors")
        weight_map = {f"tensor{k}": f"model-{k}.safetensors" for k in range(FILES)}
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    dist.barrier()
    counts: Counter[str] = Counter()

    def count(name: str) -> Any:
        function = getattr(hf_files, name)

        def count_call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*args, **options)

        return mock.patch.object(hf_files, name, count_call)

    with count("read_json"), count("inside"), count("safe_open"):
        reader = HFReader(directory, shard_of=locate_tensors(directory))
        values = reader.read(f"tensor{dist.get_rank()}", (slice(1, 2), slice(0, 2))).tolist()
    findings = {"counts": all_gather_json(counts), "values": all_gather_json(values)}
    dist.barrier()
    if dist.get_rank() == 0:
        (directory / f"model-{FILES - 1}.safetensors").unlink()
    dist.barrier()
    error = None
    try:
        locate_tensors(directory)
    except Exception as caught:
        error = [type(caught).__name__, str(caught)]
    findings["errors"] = all_gather_json(error)
    finish(findings, directory)
