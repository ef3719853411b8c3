"""A vLLM engine that drafts with MTP layers that learn, over both ranks of a trainer; run by torchrun, judged by test_drafts.py.

The model is GLM-4.5 with an MTP layer, whose layers add nothing to what they are given: both predict from the last token alone. The
MTP layer predicts as the model does, so with greedy decoding all of its drafts are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.bridge.map.trace import trace
from rlhf_mcore.bridge.run.sync import PlannedBridge
from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig, SpeculativeConfig
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.mtp import MTPLearning
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.planning.inputs import EngineGrid
from rlhf_mcore.planning.sync import engine_tensors
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.trainer.draft_metrics import draft_metrics
from rlhf_mcore.types import DRAFTS, Prompt, Sampling, Trajectory
from tests.distributed import models
from tests.distributed.setting import Settings, build, finish, gatherer, load_hf, moe_groups_of, start
from tests.e2e.rollout.drawing import worker_of
from tests.e2e.rollout.tiny import save_tokenizer

LAYOUT, DEPTH, NEW_TOKENS, TEMPERATURE = "tp2_sp_ep2_etp1_dp2", 2, 16, 0.8
MTP = "model.layers.4."
NORM, MTP_NORM = "model.norm.weight", f"{MTP}shared_head.norm.weight"  # before the output layer, of both


def make(path: Path) -> None:
    models.make("glm4_moe", path)
    models.add_mtp_layer(path)
    save_tokenizer(path)
    tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    hidden = tensors[NORM].numel()
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name].zero_()
    tensors[f"{MTP}eh_proj.weight"] = torch.eye(hidden, 2 * hidden)  # of an embedding and a hidden state the former
    tensors |= {name: torch.ones(hidden) for name in (f"{MTP}enorm.weight", f"{MTP}hnorm.weight", NORM, MTP_NORM)}
    generator = torch.Generator().manual_seed(1)
    tensors["lm_head.weight"] = torch.randn(tensors["lm_head.weight"].shape, generator=generator) * 0.3
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def move(model: MegatronModel, seed: int) -> Tensor:
    """Let the policy predict other tokens, and its MTP layer too: the same numbers come with other signs. Returns these."""
    signs = (
        torch.randint(0, 2, (model.spec.geometry.hidden_size,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    )
    with torch.no_grad():
        for parameter in model.local_parameters():
            if pieces(parameter.name, model.spec.geometry, parameter.shard)[0].hf_name in (NORM, MTP_NORM):
                parameter.tensor.mul_(signs)
    return signs


def drawn(engine: Any, hf: torch.nn.Module) -> dict[str, Any]:
    """What the engine says, how often drafts were taken, and how far its logprobs are from those of transformers."""
    prompts = [Prompt(f"p{row}", row, [3 + (7 * row + 5 * i) % 90 for i in range(4 + 3 * row)], "") for row in range(4)]
    found: dict[str, Any] = {}
    for name, sampling in {
        "greedy": Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS, records_drafts=True),
        "sampled": Sampling(n=4, temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS, seed=3, records_drafts=True),
    }.items():
        _, trajectories = worker_of(engine).draw_step(prompts, sampling, step=1)
        gaps = gaps_of(trajectories, hf, sampling.temperature or 1.0)
        shares = draft_metrics(
            torch.cat([torch.zeros(0, 2), *(torch.from_numpy(t.fields[DRAFTS]) for t in trajectories)])
        )
        found[name] = shares | {
            "gap": max(all_gather_json(max(gaps, default=0.0))),
            "ids": next(filter(None, all_gather_json([t.sampled_ids.tolist() for t in trajectories]))),
        }
    found["greedy"]["expected"] = [
        likeliest(hf, prompt.prompt_ids, ids) for prompt, ids in zip(prompts, found["greedy"]["ids"], strict=True)
    ]
    return found


@torch.no_grad()
def gaps_of(trajectories: Sequence[Trajectory], hf: torch.nn.Module, temperature: float) -> list[float]:
    gaps = []
    for each in trajectories:
        ids, first = torch.from_numpy(each.token_ids).long(), len(each.prompt.prompt_ids)
        logprobs = (hf(ids[None]).logits[0, first - 1 : -1] / temperature).log_softmax(-1)
        expected = logprobs.gather(1, ids[first:, None])[:, 0]
        gaps.append(float((expected - torch.from_numpy(each.sampled_logprobs)).abs().max()))
    return gaps


@torch.no_grad()
def likeliest(hf: torch.nn.Module, prompt: Sequence[int], ids: Sequence[int]) -> list[int]:
    """What transformers decodes greedily, if it is what was drawn: of each place the likeliest token behind those before it."""
    return hf(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


def held(tensors: Any) -> set[str]:
    return {f"{prod(t.shape)} {sorted((p.hf_name, p.start, p.shape) for p in t.pieces)}" for t in tensors}


def of_draft(engine: Any, signs: Tensor, path: Path) -> dict[str, bool]:
    """Whether tensors of MTP layers are in the engine, to the bit, where vLLM has them as files do."""
    held, layer = load_file(path / "model.safetensors"), engine.model.draft.model.layers["4"]
    return {
        "eh_proj": torch.equal(layer.eh_proj.weight, held[f"{MTP}eh_proj.weight"]),
        "norm": torch.equal(layer.shared_head.norm.weight, held[MTP_NORM] * signs),
        "layer": torch.equal(layer.mtp_block.input_layernorm.weight, held[f"{MTP}input_layernorm.weight"]),
    }


def main(directory: Path) -> None:
    platform, path, findings = start(), directory / "model", dict[str, Any]()
    if dist.get_rank() == 0:
        make(path)
    dist.barrier()
    model, _ = build(path, moe_groups_of(LAYOUT, {}), platform, Settings(mtp=MTPLearning()))
    geometry, parameters, hf = model.spec.geometry, model.local_parameters(), load_hf(path)
    cfg = RolloutConfig(
        layout=RolloutLayoutConfig(tp=dist.get_world_size()),
        kv_cache_gib=0.02,
        max_num_seqs=16,
        speculative=SpeculativeConfig("mtp", num_tokens=DEPTH),
    )
    engine: Any = build_engine(cfg, EngineModel(str(path), str(path), "fp32", 64, seed=0, shapes=hf_shapes(geometry)))
    engine._stops = []  # all responses get to their whole length
    traced = trace(engine.model, hf_shapes(geometry)).parameters
    planned = engine_tensors(geometry, EngineGrid(tp=dist.get_world_size()), dist.get_rank())
    findings["unplanned"] = all_gather_json(sorted(held(traced) ^ held(planned)))
    common: dict[str, Any] = {"bucket_bytes": 20_000, "poison": True}
    full = PlannedBridge(parameters, geometry, engine, world_group(), verify="full", gatherer=gatherer(model), **common)
    full.sync(0)  # every parameter is compared with that of a plain load, to the bit
    findings["first"] = drawn(engine, hf)
    bridge = PlannedBridge(parameters, geometry, engine, world_group(), verify="digest", **common)
    trunk, signs = list(hf_shapes(geometry.trunk)), torch.ones(geometry.hidden_size)
    for version, (name, only) in enumerate({"synced": None, "stale": trunk, "synced again": None}.items(), 1):
        moved = move(model, version) if name != "synced again" else torch.ones(geometry.hidden_size)
        signs = signs * moved
        with torch.no_grad():
            hf.model.norm.weight.mul_(moved)
        bridge.sync(version, only)
        findings[name] = drawn(engine, hf) | {"bits": of_draft(engine, signs, path)}
    engine.close()
    finish(findings, directory)
