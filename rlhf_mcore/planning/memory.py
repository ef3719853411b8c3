"""Memory of every rank in every phase of a step, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from rlhf_mcore.bridge.plan.rank_plan import DEPTH
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.implied import draws_greedy, sent_geometry
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.planning.activations import ActivationBytes, forward_activations, tower_bytes, training_activations
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import (
    PlanInputs,
    PlannedRole,
    engine_grid,
    engines_apart,
    forward_roles,
    num_engines,
    rank_share,
)
from rlhf_mcore.planning.sync import engine_bytes, kv_bytes_per_token, state_bytes_per_sequence
from rlhf_mcore.planning.weights import BYTES, copies_in_8_bits, state_bytes, weights_of_pass
from rlhf_mcore.residency.ledger import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS

_STATE = (("weights", WEIGHTS), ("gradients", GRADIENTS), ("masters", OPTIMIZER), ("moments", OPTIMIZER))
GENERATE, SYNC, SCORE = "generate", "sync", "score"
_Maker = Callable[[PlanInputs, int], "PhaseMemory"]


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Parts of the device memory of the worst rank of a phase, in bytes. ``kv_tokens`` counts in ``generate`` only."""

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


def phases(inputs: PlanInputs) -> list[PhaseMemory]:
    """List each phase with the rank that needs most in it."""
    ranks, makers = _ranks(inputs), [*_engine_phases(inputs), *_model_phases(inputs)]
    return [max((make(inputs, rank) for rank in ranks), key=lambda phase: phase.total) for make in makers]


def models_fit(inputs: PlanInputs) -> bool:
    """Tell whether every phase of the models fits, whatever the engines need in theirs. Stops at the first that does not."""
    ranks = _ranks(inputs)
    return all(make(inputs, rank).fits for make in reversed(_model_phases(inputs)) for rank in ranks)


def engines_fit(inputs: PlanInputs) -> bool:
    """Tell the same of the phases of the engines."""
    ranks = _ranks(inputs)
    return all(make(inputs, rank).fits for make in _engine_phases(inputs) for rank in ranks)


def _engine_phases(inputs: PlanInputs) -> list[_Maker]:
    return [_generate, _sync] if run_kind(inputs.cfg).generates else []


def _model_phases(inputs: PlanInputs) -> list[_Maker]:
    forward = [partial(_forward, role) for role in forward_roles(inputs.cfg, inputs.roles)]
    return [*forward, *(partial(_update, role) for role in inputs.roles if role.trained)]


def _ranks(inputs: PlanInputs) -> Collection[int]:
    """Return the first rank of every combination of pipeline stages: all others hold as much as one of these, or less."""
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
    """Return the pipeline stage of a rank; -1 for one that holds no part of the model."""
    return role.layout.coordinates(rank)["pp"] if rank in role.layout.ranks else -1


def resident(inputs: PlanInputs, rank: int, used: str = "", kinds: Collection[str] = (WEIGHTS,)) -> dict[str, int]:
    """Sum what the models hold on a rank in every phase, and the ``kinds`` that the ``used`` one needs in this one."""
    parts: dict[str, int] = {}
    for role in inputs.roles:
        state = state_bytes(role, rank)
        sizes = (weights_of_pass(role, rank), state.gradients, state.masters, state.moments)
        for (name, kind), size in zip(_STATE, sizes, strict=True):
            if size and (kind not in role.offload or (role.name == used and kind in kinds)):
                parts[f"{role.name} {name}"] = size
    parts["reserve"] = inputs.assumed.reserve_bytes
    return parts


def _shares_device(inputs: PlanInputs) -> bool:
    """Tell whether there is an engine that can sleep on the trainer's devices."""
    cfg = inputs.cfg
    return run_kind(cfg).generates and not engines_apart(cfg) and engine_kind(cfg.rollout.engine).sleeps


def _engine_weights(inputs: PlanInputs) -> int:
    return engine_bytes(inputs.cfg, sent_geometry(inputs.cfg, inputs.roles[0].geometry), inputs.dtype)


def _engine(inputs: PlanInputs, phase: str = "") -> dict[str, int]:
    """Estimate what an engine holds in a phase: nothing while it sleeps. For a sync it wakes its weights, and its cache afterwards.
    A reward model scores beside an engine that is awake, which may have to draw more.

    One that reserves no cache has one only while it generates.
    """
    rollout, apart = inputs.cfg.rollout, engines_apart(inputs.cfg)
    sleeps = rollout.sleep and _shares_device(inputs)
    if not engine_kind(rollout.engine).has_live_weights:
        return {}  # it is on devices of others
    if not run_kind(inputs.cfg).generates or ((sleeps or apart) and phase not in (GENERATE, SYNC, SCORE)):
        return {}
    weights = _engine_weights(inputs)
    if apart and phase == SCORE:
        return {}
    if engine_kind(rollout.engine).reserves_cache:
        cache = max(int(rollout.gpu_memory_utilization * inputs.gpu.memory_bytes) - weights, 0)
    else:
        cache = kv_tokens(inputs) * _kv_bytes(inputs) if phase == GENERATE else 0
    return {"engine weights": weights} | ({} if (sleeps and phase == SYNC) or not cache else {"engine cache": cache})


def _kv_bytes(inputs: PlanInputs) -> int:
    """Count the bytes of a token's keys and values on one rank of an engine."""
    return kv_bytes_per_token(
        sent_geometry(inputs.cfg, inputs.roles[0].geometry), engine_grid(inputs.cfg), BYTES[inputs.dtype]
    )


def kv_tokens(inputs: PlanInputs) -> int:
    """Count the tokens that fit an engine's cache: into its share of the device, beside weights and one prefill.

    One that reserves no cache has no share: its cache is that of the longest responses that it decodes at a time.
    """
    rollout = inputs.cfg.rollout
    if not engine_kind(rollout.engine).reserves_cache:
        drawn = rollout.sampling.n + draws_greedy(inputs.cfg)
        rows = inputs.cfg.trainer.prompts_per_step * drawn // num_engines(inputs.cfg, inputs.world_size)
        return min(rollout.max_num_seqs, max(rows, 1)) * (_longest(inputs) + state_tokens(inputs))
    budget = int(rollout.gpu_memory_utilization * inputs.gpu.memory_bytes) - _engine_weights(inputs)
    budget -= _prefill_bytes(inputs)
    return max(0, budget // _kv_bytes(inputs)) * engine_grid(inputs.cfg).dp


def state_tokens(inputs: PlanInputs) -> int:
    """Count the tokens of that cache that take as much as the states of a sequence's gated delta nets."""
    width = BYTES[inputs.dtype]
    return -(-state_bytes_per_sequence(inputs.roles[0].geometry, engine_grid(inputs.cfg), width) // _kv_bytes(inputs))


def _longest(inputs: PlanInputs) -> int:
    return inputs.cfg.data.max_prompt_tokens + inputs.cfg.rollout.sampling.max_new_tokens


def _prefill_bytes(inputs: PlanInputs) -> int:
    """Estimate the step of 8192 tokens that vLLM profiles: hidden states, the widest MLP, fp32 logits of every running sequence."""
    geometry, layout = inputs.roles[0].geometry, inputs.cfg.rollout.layout
    routed = 0 if (e := geometry.experts) is None else e.ffn_size * e.per_token + e.shared_ffn_size
    widest = max(geometry.ffn_size, routed)
    hidden = 8192 * BYTES[inputs.dtype] * (4 * geometry.hidden_size + 3 * widest // layout.tp)
    return hidden + 4 * inputs.cfg.rollout.max_num_seqs * geometry.vocab_size


def _generate(inputs: PlanInputs, rank: int) -> PhaseMemory:
    rank, beside = _beside_engine(inputs, rank)
    parts = beside | _engine(inputs, GENERATE)
    longest, problem, tokens = _longest(inputs) + state_tokens(inputs), "", kv_tokens(inputs)
    if tokens < longest:
        problem = (
            f"rollout.gpu_memory_utilization={inputs.cfg.rollout.gpu_memory_utilization:g} leaves room for {tokens} tokens of "
            f"keys and values, one sequence has {longest}"
        )
    return PhaseMemory(GENERATE, rank, parts, inputs.available, problem)


def _beside_engine(inputs: PlanInputs, rank: int, used: str = "") -> tuple[int, dict[str, int]]:
    """Find a rank with an engine, and what else it holds: nothing where engines are apart."""
    if engines_apart(inputs.cfg):
        return inputs.world_size, {"reserve": inputs.assumed.reserve_bytes}
    return rank, resident(inputs, rank, used)


def _sync(inputs: PlanInputs, rank: int) -> PhaseMemory:
    """Return the worse side of a sync, where engines are apart."""
    buckets = {"bridge buckets": 2 * DEPTH * min(inputs.cfg.bridge.bucket_bytes, _engine_weights(inputs))}
    there, beside = _beside_engine(inputs, rank, inputs.roles[0].name)
    sides = {there: beside | _engine(inputs, SYNC) | buckets}
    if there != rank:
        sides[rank] = resident(inputs, rank, inputs.roles[0].name) | buckets
    return max(
        (PhaseMemory(SYNC, place, parts, inputs.available) for place, parts in sides.items()),
        key=lambda side: side.total,
    )


def _forward(role: PlannedRole, inputs: PlanInputs, rank: int) -> PhaseMemory:
    stage, trainer = _stage(role, rank), inputs.cfg.trainer
    tokens = -(-(trainer.forward_tokens or 2 * trainer.max_tokens_per_microbatch) // role.layout.cp)
    activations = None
    if stage >= 0:
        activations = forward_activations(role, stage, tokens, BYTES[role.dtype], inputs.assumed)
    return _pass(f"{role.name} forward", role, activations, inputs, rank, (WEIGHTS,))


def _update(role: PlannedRole, inputs: PlanInputs, rank: int) -> PhaseMemory:
    tokens, stage = -(-inputs.work.microbatch_tokens // role.layout.cp), _stage(role, rank)
    activations = None
    if stage >= 0:
        count = rank_share(inputs.work, role).num_microbatches
        activations = training_activations(role, stage, tokens, count, BYTES[role.dtype], inputs.assumed)
    return _pass(f"{role.name} update", role, activations, inputs, rank, KINDS)


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
        if images := tower_bytes(role, _stage(role, rank), BYTES[role.dtype]):
            parts[f"{role.name} images"] = images
    return PhaseMemory(name, rank, parts, inputs.available)


def pinned_bytes(inputs: PlanInputs, rank: int) -> int:
    """Sum the pinned host memory of a rank: what is offloaded, and copies by asynchronous saves of state and a share of the weights.

    And the weights of an engine that keeps them when it sleeps, and the copies of what engines of their own were sent last.
    """
    keeps = _shares_device(inputs) and inputs.cfg.rollout.sleep and inputs.cfg.rollout.sleep_level == 1
    total = _engine_weights(inputs) if keeps else 0
    for role in inputs.roles:
        state = state_bytes(role, rank)
        total += state.weights * (WEIGHTS in role.offload)
        total += (state.masters + state.moments) * (OPTIMIZER in role.offload)
        if role.name == "actor" and inputs.cfg.rollout.deterministic_order:
            total += state.weights
        if role.trained and inputs.cfg.checkpoint.async_save:
            share = -(-num_parameters(role.adapters or role.geometry) * BYTES[role.dtype] // role.layout.world_size)
            total += state.masters + state.moments + share
    return total
