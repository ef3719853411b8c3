"""Run engines with adapters and engines with merged weights under torchrun. test_adapters.py asserts on the results.

DIRECTORY contains a model and receives rank<r>.json. Further arguments are names of linear layers to adapt.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import adapter_names, blocks, hf_shapes, parameter_names, pieces
from rlhf_mcore.bridge.run.merged import MergedSources, SeparateAdapterSources, adapted_weights
from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.config.schema.rollout import RolloutLayoutConfig
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry, Shard
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.types import Request, Sampling
from tests.planned_bridge import planned_bridge

RANK, SCALE = 8, 2.0
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # keys have no adapters
PROMPTS = [[5, 9, 33, 8], [7, 70, 12, 3, 18, 2]]
Whole = dict[str, Tensor]


def random_adapters(geometry: ModelGeometry, seed: int) -> Whole:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in hf_shapes(geometry).items()}


def cut_parameter(name: str, geometry: ModelGeometry, shard: Shard, full: Whole) -> LocalParameter:
    parts = pieces(name, geometry, shard)
    width = parts[0].strides[0] if len(parts[0].shape) == 2 else 1
    rows = max(part.offset + part.shape[0] * part.strides[0] for part in parts) // width
    tensor = torch.zeros(rows, width) if len(parts[0].shape) == 2 else torch.zeros(rows)
    fill(LocalParameter(name, tensor, shard), geometry, full)
    return LocalParameter(name, tensor, shard)


def fill(parameter: LocalParameter, geometry: ModelGeometry, full: Whole) -> None:
    for part in pieces(parameter.name, geometry, parameter.shard):
        view(parameter.tensor, part).copy_(full[part.hf_name][part.slices])


def reference(directory: Path, full: Whole, adapters: Whole) -> Any:
    """Return a transformers model whose linear layers add B A of their inputs, as in PEFT."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    for name, module in model.named_modules():
        key = f"base_model.model.{name}"
        if (a := adapters.get(f"{key}.lora_A.weight")) is not None:
            b = adapters[f"{key}.lora_B.weight"]
            module.register_forward_hook(lambda _m, x, y, a=a, b=b: y + SCALE * (x[0] @ a.t()) @ b.t())
    return model


@torch.no_grad()
def seen(engine: Any, model: Any) -> dict[str, Any]:
    """Return the samples of an engine, and the difference between its logprobs and the model's logprobs."""
    sampling = Sampling(temperature=1.0, max_new_tokens=12)
    drawn = engine.generate([Request(n, f"p{n}", prompt, sampling, n) for n, prompt in enumerate(PROMPTS)])
    gap, tokens = 0.0, []
    for completion in drawn:
        prompt, ids = PROMPTS[completion.request_id], completion.token_ids.tolist()
        logprobs = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
        expected = [logprobs[len(prompt) - 1 + n, token].item() for n, token in enumerate(ids)]
        gap = max(gap, max(abs(a - b) for a, b in zip(expected, completion.logprobs.tolist(), strict=True)))
        tokens.append(ids)
    return {"gap": gap, "tokens": tokens}


def main(directory: Path, *targets: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    compare(directory, *targets)
    dist.destroy_process_group()


def compare(directory: Path, *targets: str) -> None:
    """Write the samples of engines with adapters and of engines with merged weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    full = load_file(directory / "model.safetensors")
    geometry = load_spec(str(directory)).geometry
    of_adapters = replace(geometry, adapter=AdapterSizes(RANK, SCALE * RANK, targets or TARGETS))
    shard = Shard(rank, size)
    parameters = [cut_parameter(name, geometry, shard, full) for name in parameter_names(geometry)]
    versions = [random_adapters(of_adapters, seed) for seed in (1, 2, 3)]
    pairs = [adapter_names(p.name) for p in parameters if blocks(p.name, of_adapters, shard)]
    factors = [cut_parameter(name, of_adapters, shard, versions[0]) for pair in pairs for name in pair]
    results: dict[str, Any] = {}
    for mode in ("adapter", "merge"):
        cfg = RolloutConfig(layout=RolloutLayoutConfig(tp=size), kv_cache_gib=0.02, max_num_seqs=16)
        shapes = hf_shapes(of_adapters) if mode == "adapter" else None
        path = str(directory)
        engine: Any = build_engine(
            cfg, EngineModel(path, path, "fp32", 64, seed=0, shapes=hf_shapes(geometry), adapters=shapes)
        )
        aside = mode == "adapter"
        bridge = planned_bridge(
            [*parameters, *factors] if aside else parameters,
            geometry,
            engine,
            world_group(),
            bucket_bytes=20_000,
            verify=True,
            poison=True,
            sources=(SeparateAdapterSources if aside else MergedSources)(parameters, factors, of_adapters),
            adapter=of_adapters.adapter if aside else None,
            changing=list(hf_shapes(of_adapters)) if aside else adapted_weights(of_adapters),
        )
        syncs = results[mode] = []
        for version, adapters in enumerate(versions):
            for factor in factors:
                fill(factor, of_adapters, adapters)
            stats = bridge.sync(version)
            syncs.append(
                {
                    "bytes": stats.received_bytes + stats.local_bytes,
                    **seen(engine, reference(directory, full, adapters)),
                }
            )
            if version == 1:
                engine.sleep()
                engine.wake()
        if aside:
            results["without"] = seen(engine, reference(directory, full, {}))["gap"]
        engine.close()
    (directory / f"rank{rank}.json").write_text(json.dumps(results))
