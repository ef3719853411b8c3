"""transformers, Megatron and vLLM on the same tokens: rollouts of a live engine, scored by the trainer under many layouts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.sync import GatherBridge, PlannedBridge
from rlhf_mcore.bridge.trace import keep_loading_layout
from rlhf_mcore.bridge.verify import SyncMismatch
from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import local_parameters
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.trainer.exchange import Exchange
from rlhf_mcore.trainer.metrics import agreement_metrics
from rlhf_mcore.trainer.rollouts import generate
from rlhf_mcore.types import Prompt, Sampling, Score
from tests.distributed import models
from tests.distributed.setting import (
    LAYOUTS,
    TEMPERATURE,
    Settings,
    build,
    finish,
    gatherer,
    groups_of,
    hf_logprobs,
    load_hf,
    rows,
    start,
)
from tests.e2e.rollout.tiny import save_tokenizer

# Engines are started once per model and see every layout's weights.
ENGINE_TP = {"llama_rope3": 1, "mistral": 2, "qwen2_yarn": 1, "qwen3": 2, "qwen3_tied": 4}
# Ranks of one engine wait for each other by spinning, which is slow where ranks share cores: they generate for these layouts only.
FEW_LAYOUTS = ("dp4", "pp2_vpp2_dp2", "tp2_pp2")
# Engines that multiply with live weights, so that every parameter can be compared bit for bit; the others keep vLLM's packed ones.
LIVE = ("llama_rope3", "mistral", "qwen2_yarn", "qwen3_tied")


def main(directory: Path) -> None:
    began = time.perf_counter()
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {}
    prompts = [Prompt(f"p{i}", i, row.prompt_ids, "") for i, row in enumerate(rows(count=4))]
    for name, tp in ENGINE_TP.items():
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
            save_tokenizer(path)
        dist.barrier()
        cfg = RolloutConfig(layout=RolloutLayoutConfig(tp=tp), kv_cache_gib=0.02, max_num_seqs=16)
        engine = build_engine(cfg, model_dir=str(path), tokenizer_dir=str(path), dtype="fp32", max_model_len=64, seed=0)
        is_live = name in LIVE
        if is_live:
            keep_loading_layout(engine.model)
        for number, layout in enumerate(LAYOUTS):
            model, actor = build(path, groups_of(layout, groups), platform, Settings())
            GatherBridge(gatherer(model), engine).sync(2 * number)
            before = live_tensors(engine)
            found = planned(model, engine, 2 * number + 1)
            if generates(name, layout):
                found |= compare(engine, actor, prompts, path, step=number)
            found["live"] = float(min(all_gather_json(len(before))) > 0)
            found["equal"] = float(all(all_gather_json(same(before, live_tensors(engine)))))
            findings[f"{name}/{layout}"] = found
        if name == "qwen3":
            findings["faults"] = faults(directory, platform, groups, engine, prompts)
        engine.close()
        if dist.get_rank() == 0:
            print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    finish(findings, directory)


def generates(model: str, layout: str) -> bool:
    """Whether a model generates with the weights of a layout."""
    return ENGINE_TP[model] == 1 or layout in FEW_LAYOUTS


def planned(model: Any, engine: Any, version: int) -> dict[str, float]:
    """Sync through the plan into a poisoned engine, verified, with buckets smaller than the largest tensor."""
    largest = max(tensor.numel() * tensor.element_size() for _, tensor in gatherer(model))
    bucket = largest // 3
    bridge = PlannedBridge(
        local_parameters(model), model.spec.geometry, engine, bucket_bytes=bucket, verify="digest", poison=True
    )
    stats = bridge.sync(version)
    total = bridge.plan.bytes()
    return {
        "peak_share": max(all_gather_json(stats.peak_bytes / (4 * bucket))),
        "num_buckets": float(bridge.plan.num_buckets),
        "excess_bytes": float(abs(total.received - total.lower_bound).sum()),
        "received_bytes": float(total.received.sum()),
    }


def live_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of the engine's parameters that hold something; packed ones are empty and are left out."""
    return {name: p.detach().clone() for name, p in engine.model.named_parameters() if p.numel() and not p.is_meta}


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def faults(
    directory: Path, platform: Any, groups: dict[str, ModelGroups], engine: Any, prompts: list[Prompt]
) -> dict[str, Any]:
    """A sync that dies in the middle, and weights that come back."""
    found: dict[str, Any] = {}
    layout = groups_of("tp2_pp2", groups)
    outputs, digests = [], []
    if dist.get_rank() == 0:
        models.make("qwen3", directory / "qwen3_other", seed=5)
    dist.barrier()
    for version, which in enumerate(("qwen3", "qwen3_other", "qwen3")):
        model, _ = build(directory / which, layout, platform, Settings())
        bridge = PlannedBridge(
            local_parameters(model), model.spec.geometry, engine, bucket_bytes=20_000, verify="digest"
        )
        if version == 1:
            found["torn"] = torn(bridge, engine, prompts)
        bridge.sync(version)
        digests.append(bridge.source_digests())
        drawn = generate(engine, prompts, Sampling(n=1, temperature=0.0, max_new_tokens=8), step=0).trajectories
        outputs.append(all_gather_json([t.response_ids for t in drawn]))
    found["restored"] = outputs[0] == outputs[2] and digests[0] == digests[2]
    found["changed"] = outputs[0] != outputs[1] and digests[0] != digests[1]
    found["tampered"] = tampered(bridge)
    bridge.sync(9)
    return found


def torn(bridge: PlannedBridge, engine: Any, prompts: list[Prompt]) -> str:
    """Every rank fails at the third bucket: nothing may be generated afterwards."""
    original = bridge._executor._land

    def land(flight: Any, destinations: Any) -> None:
        if flight.bucket.index == 3:
            raise OSError("the wire is cut")
        original(flight, destinations)

    bridge._executor._land = land  # type: ignore[method-assign]
    try:
        bridge.sync(1)
    except OSError as error:
        cause = str(error)
    bridge._executor._land = original  # type: ignore[method-assign]
    dist.barrier()
    try:
        generate(engine, prompts, Sampling(max_new_tokens=2), step=0)
    except RuntimeError as error:
        return f"{cause}; {error}"
    return "generated"


def tampered(bridge: PlannedBridge) -> str:
    """One element of one rank's copy changes on its way: the digests must tell."""
    original = bridge._executor._scatter

    changed: list[str] = []

    def scatter(flight: Any, buffers: Any) -> None:
        original(flight, buffers)
        if dist.get_rank() == 1 and flight.receives and not changed:
            copy = flight.receives[0][0].copies[0]
            buffers[copy.buffer][copy.offset] += 1.0
            changed.append(copy.hf_name)

    bridge._executor._scatter = scatter  # type: ignore[method-assign]
    try:
        bridge.sync(8)
    except SyncMismatch as error:
        return str(error)
    finally:
        bridge._executor._scatter = original  # type: ignore[method-assign]
    return "not noticed"


def compare(engine: Any, actor: Any, prompts: list[Prompt], path: Path, step: int) -> dict[str, float]:
    """Largest differences of logprobs over all ranks: engine against trainer, engine against transformers."""
    sampling = Sampling(n=2, temperature=TEMPERATURE, max_new_tokens=8, seed=3)
    rollouts = generate(engine, prompts, sampling, step=step)
    pgs = actor.model.groups.collection
    exchange = Exchange(pgs.dp.rank(), pgs.dp.size(), sampling.n, len(prompts), pad_token_id=0)
    scores = [Score(0.0) for _ in rollouts.trajectories]
    batch = exchange(prompts, rollouts.positions, rollouts.trajectories, scores).batch
    batch.old_logprobs, _ = actor.compute_logprobs(batch)
    metrics = agreement_metrics(batch, pgs.dp)
    hf, worst = load_hf(path), 0.0
    for trajectory in rollouts.trajectories:
        row = type(rows(count=1)[0])(
            trajectory.prompt.prompt_ids, trajectory.response_ids, trajectory.rollout_logprobs, 0.0
        )
        with torch.no_grad():
            expected, _ = hf_logprobs(hf, row)
        worst = max(worst, float((expected - torch.tensor(trajectory.rollout_logprobs)).abs().max()))
    return {
        "trainer": metrics["rollout/logprob_diff_max"],
        "transformers": max(all_gather_json(worst)),
        "version": float(min(all_gather_json(engine.policy_version))),
        "num_trajectories": float(sum(all_gather_json(len(rollouts.trajectories)))),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
