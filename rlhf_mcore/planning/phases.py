"""Memory of every rank in every phase of a step, and problems with its limits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from rlhf_mcore.bridge.plan.rank_plan import DEPTH
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.engines import engine_weights, kv_bytes, kv_tokens, longest, state_tokens
from rlhf_mcore.planning.inputs import (
    PlanInputs,
    PlannedRole,
    engines_apart,
    forward_roles,
    rank_share,
)
from rlhf_mcore.planning.memory import (
    BYTES,
    ActivationBytes,
    Pass,
    copies_in_8_bits,
    forward_activations,
    staging_bytes,
    state_bytes,
    stepped_gradients,
    tower_bytes,
    training_activations,
    weights_of_pass,
)
from rlhf_mcore.residency.ledger import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS

STATE = (("weights", WEIGHTS), ("gradients", GRADIENTS), ("masters", OPTIMIZER), ("moments", OPTIMIZER))
GENERATE, SYNC, SCORE = "generate", "sync", "score"
_Maker = Callable[[PlanInputs, int], "PhaseMemory"]


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Parts of the device memory of the fullest rank in a phase, in bytes. ``problem`` describes a cache that is too small."""

    phase: str
    rank: int
    parts: Mapping[str, int]
    available: int
    problem: str = ""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.available and not self.problem

    def biggest(self, count: int = 3) -> list[tuple[str, int]]:
        """List the largest parts, by size."""
        return sorted(self.parts.items(), key=lambda item: -item[1])[:count]


def phases(inputs: PlanInputs, ranks: Collection[int] = ()) -> list[PhaseMemory]:
    """List each phase with the rank that needs the most memory in it, of ``ranks`` or of all ranks."""
    ranks, makers = ranks or stage_ranks(inputs), [*_engine_phases(inputs), *_model_phases(inputs)]
    return [max((make(inputs, rank) for rank in ranks), key=lambda phase: phase.total) for make in makers]


def models_fit(inputs: PlanInputs) -> bool:
    """Return whether every phase of the models fits, without engine phases. Stop at the first phase that does not fit."""
    ranks = stage_ranks(inputs)
    return all(make(inputs, rank).fits for make in reversed(_model_phases(inputs)) for rank in ranks)


def engines_fit(inputs: PlanInputs) -> bool:
    """Return whether the phases of the engines fit."""
    ranks = stage_ranks(inputs)
    return all(make(inputs, rank).fits for make in _engine_phases(inputs) for rank in ranks)


def _engine_phases(inputs: PlanInputs) -> list[_Maker]:
    return [_generate, _sync] if run_kind(inputs.cfg).generates else []


def _model_phases(inputs: PlanInputs) -> list[_Maker]:
    forward = [partial(_forward, role) for role in forward_roles(inputs.cfg, inputs.roles)]
    return [*forward, *(partial(_update, role) for role in inputs.roles if role.trained)]


def stage_ranks(inputs: PlanInputs) -> Collection[int]:
    """Return the first rank for every combination of pipeline stages. Every other rank holds at most as much as one of them."""
    borders = {0}
    for role in inputs.roles:
        per_stage = role.layout.world_size // role.layout.pp
        borders.update(range(role.layout.first_rank, role.layout.ranks.stop + 1, per_stage))
    end = max(role.layout.ranks.stop for role in inputs.roles)
    ranks: dict[tuple[int, ...], int] = {}
    for rank in sorted(borders - {end}):
        ranks.setdefault(tuple(_stage(role, rank) for role in inputs.roles), rank)
    return ranks.values()


def _stage(role: PlannedRole, rank: int) -> int:
    """Return the pipeline stage of a rank, or -1 if it holds no part of the model."""
    return role.layout.coordinates(rank)["pp"] if rank in role.layout.ranks else -1


def resident(inputs: PlanInputs, rank: int, used: str = "", kinds: Collection[str] = (WEIGHTS,)) -> dict[str, int]:
    """Sum the memory that the models always hold on a rank, plus the ``kinds`` that the ``used`` model needs in this phase."""
    parts: dict[str, int] = {}
    for role in inputs.roles:
        state = state_bytes(role, rank)
        sizes = (weights_of_pass(role, rank), state.gradients, state.masters, state.moments)
        for (name, kind), size in zip(STATE, sizes, strict=True):
            if size and (kind not in role.offload or (role.name == used and kind in kinds)):
                parts[f"{role.name} {name}"] = size
    parts["reserve"] = inputs.assumed.reserve_bytes
    return parts


def _shares_device(inputs: PlanInputs) -> bool:
    """Return whether an engine that can sleep shares the trainer's devices."""
    cfg = inputs.cfg
    return run_kind(cfg).generates and not engines_apart(cfg) and engine_kind(cfg.rollout.engine).sleeps


def _engine(inputs: PlanInputs, phase: str = "") -> dict[str, int]:
    """Return the memory that an engine holds in a phase.

    A sleeping engine holds nothing. A sync wakes its weights first and its cache afterwards. While a reward model scores, the
    engine is awake, because it may have to generate more. An engine that reserves no cache has a cache only while it
    generates.
    """
    rollout, apart = inputs.cfg.rollout, engines_apart(inputs.cfg)
    sleeps = rollout.sleep_level > 0 and _shares_device(inputs)
    if not engine_kind(rollout.engine).has_live_weights:
        return {}  # it runs on other devices
    if not run_kind(inputs.cfg).generates or ((sleeps or apart) and phase not in (GENERATE, SYNC, SCORE)):
        return {}
    weights = engine_weights(inputs)
    if apart and phase == SCORE:
        return {}
    if engine_kind(rollout.engine).reserves_cache:
        cache = max(int(rollout.gpu_memory_utilization * inputs.gpu.memory_bytes) - weights, 0)
    else:
        cache = kv_tokens(inputs) * kv_bytes(inputs) if phase == GENERATE else 0
    return {"engine weights": weights} | ({} if (sleeps and phase == SYNC) or not cache else {"engine cache": cache})


def _generate(inputs: PlanInputs, rank: int) -> PhaseMemory:
    rank, beside = _engine_rank_memory(inputs, rank)
    parts = beside | _engine(inputs, GENERATE)
    needed, problem, tokens = longest(inputs) + state_tokens(inputs), "", kv_tokens(inputs)
    if tokens < needed:
        problem = (
            f"rollout.gpu_memory_utilization={inputs.cfg.rollout.gpu_memory_utilization:g} leaves space for {tokens} tokens of "
            f"keys and values, but one sequence has {needed}"
        )
    return PhaseMemory(GENERATE, rank, parts, inputs.available, problem)


def _engine_rank_memory(inputs: PlanInputs, rank: int, used: str = "") -> tuple[int, dict[str, int]]:
    """Return an engine rank and the memory of other parts on it. Disaggregated engines share their device with no model."""
    if engines_apart(inputs.cfg):
        return inputs.world_size, {"reserve": inputs.assumed.reserve_bytes}
    return rank, resident(inputs, rank, used)


def _sync(inputs: PlanInputs, rank: int) -> PhaseMemory:
    """Return the fuller side of a sync if engines are disaggregated."""
    buckets = {"bridge buckets": 2 * DEPTH * min(inputs.cfg.bridge.bucket_bytes, engine_weights(inputs))}
    there, beside = _engine_rank_memory(inputs, rank, inputs.roles[0].name)
    sides = {there: beside | _engine(inputs, SYNC) | buckets}
    if there != rank:
        sides[rank] = resident(inputs, rank, inputs.roles[0].name) | buckets
    return max(
        (PhaseMemory(SYNC, place, parts, inputs.available) for place, parts in sides.items()),
        key=lambda side: side.total,
    )


def _forward(role: PlannedRole, inputs: PlanInputs, rank: int) -> PhaseMemory:
    stage, trainer = _stage(role, rank), inputs.cfg.trainer
    run = _run(role, inputs, trainer.forward_tokens or 2 * trainer.max_tokens_per_microbatch)
    activations = forward_activations(run, stage) if stage >= 0 else None
    return _pass(f"{role.name} forward", role, activations, inputs, rank, (WEIGHTS,))


def _update(role: PlannedRole, inputs: PlanInputs, rank: int) -> PhaseMemory:
    stage, count = _stage(role, rank), rank_share(inputs.work, role).num_microbatches
    run = _run(role, inputs, inputs.work.microbatch_tokens)
    activations = training_activations(run, stage, count) if stage >= 0 else None
    update = _pass(f"{role.name} update", role, activations, inputs, rank, KINDS)
    if (copies := stepped_gradients(role, rank)) <= (0 if activations is None else activations.total):
        return update
    parts = resident(inputs, rank, role.name, KINDS) | _engine(inputs) | {f"{role.name} gradients in fp32": copies}
    return max(update, replace(update, parts=parts), key=lambda phase: phase.total)


def _run(role: PlannedRole, inputs: PlanInputs, tokens: int) -> Pass:
    """Describe a pass over microbatches of ``tokens`` tokens, summed over context-parallel ranks."""
    return Pass(role, -(-tokens // role.layout.cp), inputs.assumed.expert_imbalance, inputs.work.copied_keys(role))


def _pass(
    name: str,
    role: PlannedRole,
    activations: ActivationBytes | None,
    inputs: PlanInputs,
    rank: int,
    kinds: Collection[str],
) -> PhaseMemory:
    parts = resident(inputs, rank, role.name, kinds) | _engine(inputs, SCORE if role.name == "reward" else "")
    if activations is not None:
        parts |= {f"{role.name} activations": activations.layers, f"{role.name} logits": activations.logits}
        if copies := copies_in_8_bits(role, rank, training=kinds is KINDS):
            parts[f"{role.name} weights in 8 bits"] = copies
        if images := tower_bytes(role, _stage(role, rank)):
            parts[f"{role.name} images"] = images
    return PhaseMemory(name, rank, parts, inputs.available)


def hosted_bytes(inputs: PlanInputs, rank: int) -> int:
    """Sum the optimizer states of a rank that the host keeps and steps. They are not pinned."""
    return sum(state_bytes(role, rank).hosted for role in inputs.roles)


def pinned_bytes(inputs: PlanInputs, rank: int) -> int:
    """Sum the pinned host memory of a rank.

    Offloaded parts and buffers for a hosted optimizer state are pinned. Copies for asynchronous saves contain the
    optimizer state and a share of the weights. An engine may keep its weights while it sleeps. For disaggregated
    engines, copies of the weights last sent are kept.
    """
    keeps = _shares_device(inputs) and inputs.cfg.rollout.sleep_level == 1
    total = engine_weights(inputs) if keeps else 0
    for role in inputs.roles:
        state = state_bytes(role, rank)
        total += state.weights * (WEIGHTS in role.offload)
        total += (state.masters + state.moments) * (OPTIMIZER in role.offload) + staging_bytes(role, rank)
        if role.name == "actor" and inputs.cfg.rollout.deterministic_order:
            total += state.weights
        if role.trained and inputs.cfg.checkpoint.async_save:
            share = -(-num_parameters(role.adapters or role.geometry) * BYTES[role.dtype] // role.layout.world_size)
            total += state.masters + state.moments + share
    return total
