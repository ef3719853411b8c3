"""Compare transformers, Megatron and vLLM on the same tokens: rollouts of a live engine, scored by the trainer under many layouts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.bridge.files.gather import GatherBridge
from rlhf_mcore.bridge.map.engine import keep_loading_layout
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.map.trace import trace
from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run.endpoints import EngineDestinations
from rlhf_mcore.bridge.run.sync import PlannedBridge
from rlhf_mcore.bridge.run.transports import SharedMemory
from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig
from rlhf_mcore.families.quantised import QUANTISATIONS, quantisation_problems
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.planning.inputs import EngineGrid
from rlhf_mcore.protocols import SyncMismatch
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.trainer.batches import SampledBatch
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.metrics import agreement_metrics
from rlhf_mcore.trainer.publishers import TOLERANCE, Canary, canary_prompts
from rlhf_mcore.types import Prompt, Sampling, TrainBatch
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import (
    TEMPERATURE,
    Settings,
    build,
    finish,
    gatherer,
    groups_of,
    hf_logprobs,
    load_hf,
    moe_groups_of,
    rows,
    start,
)
from tests.e2e.plain_load import sync_and_compare
from tests.e2e.rollout.drawing import sampler_of
from tests.e2e.rollout.tiny import save_tokenizer
from tests.e2e.three_way_cases import (
    DELTA_NETS,
    ENGINES,
    EXPERTS,
    FURTHER,
    GRIDS,
    IN_BF16,
    Width,
    generates,
    layouts,
)
from tests.engine_layout import engine_tensors
from tests.episodes import sample_rollouts
from tests.plan_bytes import count_bytes
from tests.planned_bridge import planned_bridge
from tests.rows import Row
from tests.unit.bridge.eight_bits import slow_values

# Planned as if every two ranks were on a separate machine.
TWO_NODES = ("tp2_dp2", "pp4", "tp2_pp2_vpp2_sp_uneven", "tp2_sp_pp2_ep2_etp1")
# Engines that multiply with live weights. The others keep vLLM's packed weights. All engines pack experts.
LIVE = ("llama_rope3", "mistral", "qwen2_yarn", "qwen3_tied", "mixtral")


@dataclass(slots=True)
class World:
    """Objects that all engines of a run share."""

    directory: Path
    platform: Any
    prompts: list[Prompt]
    groups: dict[str, ModelGroups] = field(default_factory=dict)

    def groups_of(self, model: str, layout: str) -> ModelGroups:
        return (moe_groups_of if model in EXPERTS else groups_of)(layout, self.groups)


def main(directory: Path) -> None:
    began = time.perf_counter()
    world = World(directory, start(), [Prompt(f"p{i}", i, row.prompt_ids, "") for i, row in enumerate(rows(count=4))])
    findings: dict[str, Any] = {}
    for name, tp in ENGINES:
        findings |= measure(world, name, tp)
        if dist.get_rank() == 0:
            print(f"{name} {tp}: {time.perf_counter() - began:.0f} s", flush=True)
    finish(findings, directory)


def measure(world: World, name: str, tp: Width) -> dict[str, Any]:
    """Measure all layouts of one engine."""
    path, findings = world.directory / name, dict[str, Any]()
    if dist.get_rank() == 0 and not path.exists():
        models.make(name, path)
        save_tokenizer(path)
    dist.barrier()
    grid = GRIDS[tp] if isinstance(tp, str) else RolloutLayoutConfig(tp=tp)
    cfg = RolloutConfig(layout=grid, kv_cache_gib=0.02, max_num_seqs=16)
    shapes = hf_shapes(load_spec(path).geometry)
    dtype = "bf16" if name in IN_BF16 else "fp32"
    engine: Any = build_engine(cfg, EngineModel(str(path), str(path), dtype, 64, seed=0, shapes=shapes))
    if name in LIVE:
        keep_loading_layout(engine.model)
    # vLLM fuses two projections of latent attention, which the planner counts separately.
    if name in DELTA_NETS or (tp in GRIDS and name != "deepseek_v3_heads"):  # bridge/test_trace.py checks the others
        findings[f"{name}/{tp}"] = any_rank(
            all_gather_json(difference_from_plan(engine, path, shapes, EngineGrid(**vars(grid))))
        )
    for number, layout in enumerate(layouts(name)):
        model, actor = build(path, world.groups_of(name, layout), world.platform, Settings(dtype=dtype))
        GatherBridge(gatherer(model), engine).sync(3 * number)
        before = live_tensors(engine)
        asked = name in FURTHER and generates(layout, tp)  # layers packed differently from other models
        said = greedy(engine, world.prompts) if asked else None
        nodes = [0, 0, 1, 1] if layout in TWO_NODES else None
        found = sync_planned(model, engine, 3 * number + 1, nodes=nodes)
        if generates(layout, tp):
            found |= compare(engine, actor, world.prompts, path, step=number)
        found["same_words"] = float(not asked or greedy(engine, world.prompts) == said)
        found["live"] = float(min(all_gather_json(len(before))) > 0)
        found["difference"] = any_rank(all_gather_json(first_difference(live_tensors(engine), before)))
        findings[f"{name}/{tp}/{layout}"] = found
    if name == "qwen3_seven":
        findings["faults"] = faults(world, engine)
    if (tp in GRIDS and not any(quantisation_problems(model.spec.geometry))) or "faults" in findings:
        findings[f"{name}/{tp}/8 bits"] = eight_bits(world, path, model, engine)
    engine.close()
    return findings


def difference_from_plan(engine: Any, path: Path, shapes: dict[str, tuple[int, ...]], grid: EngineGrid) -> str:
    """Return the first tensor whose planned description differs from the traced engine."""

    def describe(tensors: Any) -> set[str]:
        return {f"{prod(t.shape)} {sorted((p.hf_name, p.start, p.shape) for p in t.pieces)}" for t in tensors}

    traced = describe(trace(engine.model, shapes).parameters)
    expected = describe(engine_tensors(load_spec(path).geometry, grid, dist.get_rank() % grid.size))
    return min(traced ^ expected, default="")


def sync_planned(model: Any, engine: Any, version: int, **options: Any) -> dict[str, Any]:
    """Sync through the plan to a poisoned engine.

    The first sync uses a single bucket, in which repacked layers take turns, and is compared in full. The second sync uses buckets
    smaller than the largest tensor, and is checked by hashes.
    """
    largest = max(tensor.numel() * tensor.element_size() for _, tensor in gatherer(model))
    bucket = largest // 3
    parameters, geometry = model.local_parameters(), model.spec.geometry
    whole = planned_bridge(
        parameters,
        geometry,
        engine,
        world_group(),
        bucket_bytes=1 << 24,
        verify=True,
        poison=True,
        **options,
    )
    assert whole.plan.num_buckets == 1
    sync_and_compare(whole, gatherer(model), version)
    bridge = planned_bridge(
        parameters, geometry, engine, world_group(), bucket_bytes=bucket, verify=True, poison=True, **options
    )
    stats = bridge.sync(version + 1)
    total = count_bytes(bridge.plan)
    return {
        "peak_share": max(all_gather_json(stats.peak_bytes / (4 * bucket))),
        "num_buckets": float(bridge.plan.num_buckets),
        "excess_bytes": float(abs(total.received - total.lower_bound).sum()),
        "received_bytes": float(total.received.sum()),
    }


def live_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of the engine's non-empty parameters. Packed parameters are empty and are skipped."""
    return {name: p.detach().clone() for name, p in engine.model.named_parameters() if p.numel() and not p.is_meta}


def faults(world: World, engine: Any) -> dict[str, Any]:
    """Check syncs that fail, that are tampered with, or that send a part or nothing, and weights that are restored."""
    found: dict[str, Any] = {}
    groups = groups_of("tp2_pp2_vpp2_sp_uneven", world.groups)
    name, other = "qwen3_seven", "qwen3_seven_other"
    outputs, digests = [], []
    if dist.get_rank() == 0:
        models.make(name, world.directory / other, seed=5)
    dist.barrier()
    for version, which in enumerate((name, other, name)):
        model, _ = build(world.directory / which, groups, world.platform, Settings())
        bridge = planned_bridge(
            model.local_parameters(), model.spec.geometry, engine, world_group(), bucket_bytes=20_000, verify=True
        )
        if version == 1:
            found["torn"] = torn(bridge, engine, world.prompts)
        bridge.sync(version)
        digests.append(bridge._source_digests(bridge._whole))
        outputs.append(greedy(engine, world.prompts))
    found["outputs"], found["digests"] = outputs, digests
    found["tampered"] = check_tampering(bridge)
    bridge.sync(9)
    found |= some_tensors(world, groups, engine)
    return found


def eight_bits(world: World, path: Path, model: Any, engine: Any) -> list[Any]:
    """Compare engines with synced 8-bit weights and engines that load the same values, computed from files by slow versions."""
    said = []
    options: dict[str, Any] = {"bucket_bytes": 20_000, "verify": True, "poison": True}
    for number, kind in enumerate(QUANTISATIONS.values()):
        bridge = planned_bridge(
            model.local_parameters(), model.spec.geometry, engine, world_group(), quantisation=kind.name, **options
        )
        bridge.sync(20 + 2 * number)
        brought = greedy(engine, world.prompts)
        weights = load_file(path / "model.safetensors")
        values = {name: slow_values(w, kind) if kind.applies(name) else w for name, w in weights.items()}
        engine.load_weights(iter(values.items()), version=21 + 2 * number)
        said.append([brought, greedy(engine, world.prompts)])
    return said


def greedy(engine: Any, prompts: list[Prompt]) -> list[Any]:
    """Return the greedy responses of all engines and their logprobs."""
    sampling = Sampling(n=1, temperature=0.0, max_new_tokens=8)
    drawn = [each.trajectory for each in sample_rollouts(sampler_of(engine), prompts, sampling, step=0)]
    return all_gather_json([[t.sampled_ids.tolist(), t.sampled_logprobs.tolist()] for t in drawn])


def some_tensors(world: World, groups: ModelGroups, engine: Any) -> dict[str, Any]:
    """Sync two tensors of another model. The engine must equal an engine that was loaded with a mixture of both files.

    Its matrices are packed, so keys and values are sent with the queries. Then the canary detects a sync that sends nothing.
    """
    path, other = world.directory / "qwen3_seven", world.directory / "qwen3_seven_other"
    model, actor = build(other, groups, world.platform, Settings())
    changing = ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"]
    options: dict[str, Any] = {"bucket_bytes": 20_000, "verify": True, "changing": changing}
    bridge = planned_bridge(model.local_parameters(), model.spec.geometry, engine, world_group(), **options)
    stats = bridge.sync(10)
    brought = greedy(engine, world.prompts)
    names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"] + ["model.norm.weight"]
    newer = load_file(other / "model.safetensors")
    mixture = load_file(path / "model.safetensors") | {name: newer[name] for name in names}
    engine.load_weights(iter(mixture.items()), version=11)
    prompts = canary_prompts(engine.rank.num_engines, 8, 97)
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=8)
    canary = Canary(sampler_of(engine), engine, actor, prompts, sampling, TOLERANCE[torch.float32])
    found = {
        "some_brought": [brought, greedy(engine, world.prompts)],
        "some_bytes": max(all_gather_json(stats.received_bytes + stats.local_bytes)),
        "all_bytes": min(all_gather_json(bridge.rank_plan.received_bytes + bridge.rank_plan.local_bytes)),
    }
    with engine.begin(12):  # weights that no sync has sent
        pass
    try:
        canary.check(12)
        found["canary"] = "not noticed"
    except SyncMismatch as error:
        found["canary"] = str(error)
    found["dropped"] = max(all_gather_json(engine.policy_version))
    bridge.sync(13)
    canary.check(13)
    found["agreed"] = min(all_gather_json(engine.policy_version))
    return found


def torn(bridge: PlannedBridge, engine: Any, prompts: list[Prompt]) -> str:
    """Let every rank fail at the third bucket. The engine must not generate afterwards."""
    open_bucket = EngineDestinations.open

    def failing(landing: EngineDestinations, bucket: Bucket) -> Any:
        if bucket.index == 3:
            raise OSError("the wire is cut")
        return open_bucket(landing, bucket)

    with mock.patch.object(EngineDestinations, "open", failing):
        try:
            bridge.sync(1)
        except OSError as error:
            cause = str(error)
    dist.barrier()
    try:
        sample_rollouts(sampler_of(engine), prompts, Sampling(max_new_tokens=2), step=0)
    except RuntimeError as error:
        return f"{cause}; {error}"
    return "generated"


def check_tampering(bridge: PlannedBridge) -> str:
    """Change one element of one rank's copy in transit. The digests must detect it."""
    post = SharedMemory.post
    changed: list[int] = []

    def tampering(transport: SharedMemory, sends: Any, receives: Any, tag: int) -> Any:
        exchange = post(transport, sends, receives, tag)
        if dist.get_rank() == 1 and receives and not changed:
            exchange.arrive()
            receives[0].parts[0].view(-1)[0] += 1.0
            changed.append(tag)
        return exchange

    with mock.patch.object(SharedMemory, "post", tampering):
        try:
            bridge.sync(8)
        except SyncMismatch as error:
            return str(error)
    return "not noticed"


def compare(engine: Any, actor: Any, prompts: list[Prompt], path: Path, step: int) -> dict[str, float]:
    """Return the largest logprob differences over all ranks: engine against trainer, and engine against transformers.

    For gated delta nets, also return the mean errors of engine, trainer and transformers in bf16 against transformers in fp32.
    """
    by_noise = path.name in DELTA_NETS
    sampling = Sampling(n=2, temperature=TEMPERATURE, max_new_tokens=48 if by_noise else 8, seed=3)
    rollouts = sample_rollouts(sampler_of(engine), prompts, sampling, step=step)
    batch, _ = RowExchange(sampling.n)(SampledBatch(prompts, rollouts))
    batch.old_logprobs = actor.compute_logprobs(batch)
    exact, of_engine = by_transformers(batch, path), batch.rollout_logprobs[batch.loss_mask]
    found = {
        "trainer": agreement_metrics(batch)["rollout/logprob_diff_max"],
        "transformers": max(all_gather_json(max((exact - of_engine).abs().tolist(), default=0.0))),
        "version": float(min(all_gather_json(engine.policy_version))),
        "num_trajectories": float(sum(all_gather_json(len(rollouts)))),
    }
    if by_noise:
        of_trainer, in_bf16 = batch.old_logprobs[batch.loss_mask], by_transformers(batch, path, torch.bfloat16)
        for name, logprobs in (("of_engine", of_engine), ("of_trainer", of_trainer), ("of_bf16", in_bf16)):
            total = sum(all_gather_json(float((logprobs - exact).abs().sum())))
            found[f"error_{name}"] = total / float(batch.num_sampled.sum())
    return found


def by_transformers(batch: TrainBatch, path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return transformers' logprobs of the sampled tokens of this rank's rows, one row at a time."""
    hf, sizes = load_hf(path, dtype), batch.lengths[batch.rows].tolist()
    found = [torch.zeros(0)]
    for ids, mask in zip(batch.token_ids.split(sizes), batch.loss_mask.split(sizes), strict=True):
        with torch.no_grad():
            found.append(hf_logprobs(hf, Row(ids[~mask].tolist(), ids[mask].tolist(), []))[0])
    return torch.cat(found)
