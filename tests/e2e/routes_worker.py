"""Compare recorded routes of engines with transformers' routers, and replay them in the trainer's passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig, SpeculativeConfig
from rlhf_mcore.config.schema.rollout import SamplingConfig
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json, reduce_sums
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles.policy import logprobs_of, recorded_routes, routes_of
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.trainer.batches import SampledBatch
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.types import ROUTES, Prompt, Request, Sampling, TrainBatch, Trajectory
from tests.distributed import models
from tests.distributed.replay_worker import own_routes
from tests.distributed.setting import Settings, build, finish, load_hf, start
from tests.e2e.rollout.drawing import sampler_of
from tests.e2e.rollout.tiny import save_tokenizer
from tests.episodes import sample_rollouts

TEMPERATURE, NEW_TOKENS = 0.8, 60
SCALE = 6  # factor of the experts' outputs, so that they weigh as much as all other parts, as in trained models
LAYOUTS = {
    "dp2": ParallelLayout(2),
    "tp2_sp_ep2": ParallelLayout(2, 2, 1, None, 1, True, 2, 1),
    "pp2": ParallelLayout(2, 1, 2),
    "cp2_ep2": ParallelLayout(2, 1, 1, None, 2, False, 2),
}


@dataclass(frozen=True)
class Case:
    """An engine: its dtype and layout, and settings that make it split, recompute or skip tokens."""

    dtype: str = "fp32"
    tp: int = 1
    max_tokens: int | None = None  # per pass
    gib: float = 0.05
    prefix_caching: bool = True
    drafts: bool = False


CASES = {
    "in parts": Case(max_tokens=40),
    "preempted": Case(gib=0.0015),
    "without cache": Case(prefix_caching=False),
    "tp2": Case(tp=2, max_tokens=40),
    "drafts": Case(drafts=True),
    "bf16": Case(dtype="bf16", max_tokens=40),
}


def main(directory: Path) -> None:
    platform, findings, path = start(), dict[str, Any](), directory / "model"
    if dist.get_rank() == 0:
        models.make("qwen3_moe_mixed", path, moe_intermediate_size=64, num_experts=16, max_position_embeddings=512)
        made = load_file(path / "model.safetensors")
        scaled = {
            name: weight * (SCALE if ".experts." in name and "down_proj" in name else 1)
            for name, weight in made.items()
        }
        save_file(scaled, path / "model.safetensors", {"format": "pt"})
        save_tokenizer(path)
    dist.barrier()
    weights = load_file(path / "model.safetensors")
    hf, shapes = load_hf(path), hf_shapes(load_spec(path).geometry)
    # Prompts of two cache blocks and a part of a block. The first two prompts share a prefix.
    prompts = [Prompt(f"p{i}", i, [(7 * (i // 2) + 5 * k) % 90 + 3 for k in range(70)] + [i + 3], "") for i in range(4)]
    for name, case in CASES.items():
        drawn = SamplingConfig(n=4, temperature=TEMPERATURE, max_new_tokens=NEW_TOKENS)
        cfg = RolloutConfig(
            layout=RolloutLayoutConfig(tp=case.tp),
            kv_cache_gib=case.gib,
            max_num_seqs=8,
            max_num_batched_tokens=case.max_tokens,
            vllm={"enable_prefix_caching": case.prefix_caching},
            sampling=drawn,
            at_publish="resubmit" if name == "preempted" else "continue",
        )
        if case.drafts:
            cfg.speculative = SpeculativeConfig(method="ngram", num_tokens=2, ngram_tokens=1)
        model = EngineModel(str(path), str(path), case.dtype, 300, seed=0, shapes=shapes, records_routes=True)
        engine = build_engine(cfg, model)
        engine._stops = []
        engine.load_weights(iter(weights.items()), version=0)
        preempted = count_calls(engine._scheduler, "_preempt_request")
        sampling = Sampling(**vars(drawn), seed=3, records_routes=True)
        rollouts = sample_rollouts(sampler_of(engine), prompts, sampling, step=1)
        trajectories = [each.trajectory for each in rollouts]
        findings[name] = against_routers(trajectories, hf)
        findings[name]["preempted"] = max(all_gather_json(len(preempted)))
        findings[name]["cached"] = max(all_gather_json(sum(each.num_cached for each in trajectories)))
        findings[name] |= turns(engine, hf, weights, sampling) if name in ("in parts", "preempted") else {}
        others = sampler_of(engine).sample(prompts, Sampling(max_new_tokens=4), step=1)
        findings[name]["without"] = all(not each.fields for each in others)
        batch, _ = RowExchange(sampling.n)(SampledBatch(prompts, rollouts))
        engine.close()
        for layout in LAYOUTS if name == "bf16" else ():
            groups = build_groups(LAYOUTS[layout])
            assert groups is not None
            _, actor = build(path, groups, platform, Settings(max_tokens=512, router_replay="rollout"))
            findings[layout] = replay(batch, actor.model)
    finish(findings, directory)


def count_calls(owner: Any, name: str) -> list[None]:
    """Return a list that grows by one element with each call of a method."""
    method, calls = getattr(owner, name), list[None]()

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return method(*args, **kwargs)

    setattr(owner, name, count)
    return calls


def against_routers(trajectories: list[Trajectory], hf: torch.nn.Module) -> dict[str, float]:
    """Return the number of choices that differ from transformers in fp32, and of all choices, over tokens and layers."""
    sums = {"different": 0.0, "unknown": 0.0, "all": 0.0}
    for each in trajectories:
        routes = torch.from_numpy(each.fields[ROUTES]).long()
        assert not routes[0].any() and len(routes) == len(each.token_ids)
        own = own_routes(hf, each.token_ids.tolist())[:-1] + 1
        sums["different"] += int((routes[1:].sort(-1).values != own).any(-1).sum())
        sums["unknown"] += int((routes[1:] == 0).sum())
        sums["all"] += own[..., 0].numel()
    return reduce_sums(sums)


def turns(engine: Any, hf: torch.nn.Module, weights: dict[str, torch.Tensor], sampling: Sampling) -> dict[str, Any]:
    """Run an episode of three turns, republishing the same weights during each turn. Compare its routes with transformers."""
    prompt = Prompt("turns", 9, list(range(3, 80)), "")
    tokens, written, cached = list(prompt.prompt_ids), [], 0
    for turn in range(3):
        engine.submit([Request(turn, "turn", tokens, sampling, seed=turn)])
        for step in range(200):
            if step == 20:
                engine.load_weights(iter(weights.items()), version=turn + 1)
            if finished := engine.step():
                break
        observation = np.arange(60 + turn, 70 + turn, dtype=np.int32)
        written += [*finished, observation]
        cached += finished[0].num_cached
        tokens += [*finished[0].token_ids.tolist(), *observation.tolist()]
    made = episode(prompt, 0, written[:-1], "")
    return {f"turns_{name}": value for name, value in against_routers([made], hf).items()} | {
        "versions": len(made.versions),
        "turns_cached": cached,
    }


def replay(batch: TrainBatch, model: Any) -> dict[str, Any]:
    """Return mean and largest logprob difference, KL (k3) and changed routes, with the trainer's routes and with the engine's."""
    found: dict[str, Any] = {}
    own, wanted = dict(batch.fields), batch.fields[ROUTES]
    for kind, routes in (("own", {}), ("replayed", routes_of(batch, "rollout"))):
        with recorded_routes(model, batch):
            logprobs = logprobs_of(model, batch, TEMPERATURE, routes=routes)
        ratios = (logprobs - batch.rollout_logprobs)[batch.loss_mask]
        gaps = ratios.abs()
        taken = batch.fields[ROUTES].sort(-1).values
        changed = (taken != wanted.sort(-1).values).any(-1)[wanted[..., 0] > 0]
        sums = {
            "gap": float(gaps.sum()),
            "tokens": float(len(gaps)),
            "changed": float(changed.sum()),
            "all": float(len(changed)),
        }
        sums["kl"] = float((ratios.exp() - 1 - ratios).sum())
        sums |= {"largest_max": float(gaps.max()) if len(gaps) else 0.0}
        total = reduce_sums(sums)
        found[kind] = [
            total["gap"] / total["tokens"],
            total["kl"] / total["tokens"],
            total["largest_max"],
            total["changed"],
        ]
        batch.fields = dict(own)
    return found
