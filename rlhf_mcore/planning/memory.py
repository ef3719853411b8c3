"""Memory of every rank in every phase of a step, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_mcore.config.derive import is_supervised
from rlhf_mcore.config.schema import Config
from rlhf_mcore.planning.activations import forward_activations, training_activations
from rlhf_mcore.planning.batches import Workload, cut
from rlhf_mcore.planning.engine import engine_numel, kv_bytes_per_token
from rlhf_mcore.planning.hardware import Assumptions, Gpu
from rlhf_mcore.planning.roles import Role
from rlhf_mcore.planning.transfer import DEPTH
from rlhf_mcore.planning.weights import BYTES, num_parameters, state_bytes

GENERATE, SYNC = "generate", "sync"


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
        """The largest parts, by size."""
        return sorted(self.parts.items(), key=lambda item: -item[1])[:count]


@dataclass(frozen=True, slots=True)
class Setting:
    """All that memory depends on."""

    cfg: Config
    roles: Sequence[Role]
    dtype: str
    gpu: Gpu
    assumed: Assumptions
    work: Workload
    world_size: int

    @property
    def available(self) -> int:
        return int(self.gpu.memory_bytes * self.assumed.usable_memory)


def phases(setting: Setting) -> list[PhaseMemory]:
    """Each phase with the rank that needs most in it."""
    ranks = _telling_ranks(setting.roles)
    makers: list[_Maker] = [_update(role) for role in setting.roles if role.trained]
    if not is_supervised(setting.cfg):
        makers = [_generate, _sync, *map(_forward, setting.roles), *makers]
    return [max((make(setting, rank) for rank in ranks), key=lambda phase: phase.total) for make in makers]


def _telling_ranks(roles: Sequence[Role]) -> list[int]:
    """The first rank of every combination of pipeline stages: all other ranks hold as much as one of these, or less."""
    seen: dict[tuple[int, ...], int] = {}
    for rank in range(max(role.layout.ranks.stop for role in roles)):
        seen.setdefault(tuple(_stage(role, rank) for role in roles), rank)
    return list(seen.values())


def _stage(role: Role, rank: int) -> int:
    """The pipeline stage of a rank; -1 for one that holds no part of the model."""
    return role.layout.coordinates(rank)["pp"] if rank in role.layout.ranks else -1


def resident(setting: Setting, rank: int, used: str = "") -> dict[str, int]:
    """What the models hold on a rank in every phase, and, offloaded otherwise, the one that is ``used`` in this one."""
    parts: dict[str, int] = {}
    for role in setting.roles:
        if role.offloaded and role.name != used:
            continue
        state = state_bytes(role, rank)
        named = {
            "weights": state.weights,
            "gradients": state.gradients,
            "masters": state.masters,
            "moments": state.moments,
        }
        parts |= {f"{role.name} {name}": size for name, size in named.items() if size}
    parts["reserve"] = setting.assumed.reserve_bytes
    return parts


def _engine_weights(setting: Setting) -> int:
    return engine_numel(setting.roles[0].geometry, setting.cfg.rollout.layout.tp) * BYTES[setting.dtype]


def _idle_engine(setting: Setting) -> dict[str, int]:
    """What an engine holds while others work: nothing when it sleeps."""
    if setting.cfg.rollout.sleep or is_supervised(setting.cfg):
        return {}
    return {"engine": int(setting.cfg.rollout.gpu_memory_utilization * setting.gpu.memory_bytes)}


def kv_tokens(setting: Setting) -> int:
    """Tokens that an engine's cache holds: what its share of the device leaves over beside weights and one prefill."""
    rollout, geometry = setting.cfg.rollout, setting.roles[0].geometry
    budget = int(rollout.gpu_memory_utilization * setting.gpu.memory_bytes) - _engine_weights(setting)
    budget -= _prefill_bytes(setting)
    return max(0, budget // kv_bytes_per_token(geometry, rollout.layout.tp, BYTES[setting.dtype]))


def _prefill_bytes(setting: Setting) -> int:
    """vLLM profiles one step of 8192 tokens: hidden states, the widest MLP, fp32 logits of every running sequence."""
    geometry, tp = setting.roles[0].geometry, setting.cfg.rollout.layout.tp
    widest = max(geometry.ffn_size, geometry.expert_ffn_size * max(setting.roles[0].experts_per_token, 1))
    hidden = 8192 * BYTES[setting.dtype] * (4 * geometry.hidden_size + 3 * widest // tp)
    return hidden + 4 * setting.cfg.rollout.max_num_seqs * geometry.vocab_size


def _generate(setting: Setting, rank: int) -> PhaseMemory:
    share = int(setting.cfg.rollout.gpu_memory_utilization * setting.gpu.memory_bytes)
    weights = _engine_weights(setting)
    parts = resident(setting, rank) | {"engine weights": weights, "engine cache": max(share - weights, 0)}
    longest = setting.cfg.data.max_prompt_tokens + setting.cfg.rollout.sampling.max_new_tokens
    problem, tokens = "", kv_tokens(setting)
    if tokens < longest:
        problem = (
            f"rollout.gpu_memory_utilization={setting.cfg.rollout.gpu_memory_utilization:g} leaves room for {tokens} tokens of "
            f"keys and values, one sequence has {longest}"
        )
    return PhaseMemory(GENERATE, rank, parts, setting.available, problem)


def _sync(setting: Setting, rank: int) -> PhaseMemory:
    share = int(setting.cfg.rollout.gpu_memory_utilization * setting.gpu.memory_bytes)
    buckets = 2 * DEPTH * min(setting.cfg.bridge.bucket_bytes, _engine_weights(setting))
    return PhaseMemory(
        SYNC, rank, resident(setting, rank) | {"engine": share, "bridge buckets": buckets}, setting.available
    )


_Maker = Callable[[Setting, int], PhaseMemory]


def _forward(role: Role) -> _Maker:
    def make(setting: Setting, rank: int) -> PhaseMemory:
        tokens = _microbatch_tokens(setting, role)
        name, stage = f"{role.name} forward", _stage(role, rank)
        parts = resident(setting, rank, role.name) | _idle_engine(setting)
        if stage >= 0:
            found = forward_activations(role, stage, tokens, BYTES[role.dtype], setting.assumed)
            parts |= {f"{role.name} activations": found.layers, f"{role.name} logits": found.logits}
        return PhaseMemory(name, rank, parts, setting.available)

    return make


def _update(role: Role) -> _Maker:
    def make(setting: Setting, rank: int) -> PhaseMemory:
        tokens, count = _microbatch_tokens(setting, role), cut(setting.work, role).num_microbatches
        name, stage = f"{role.name} update", _stage(role, rank)
        parts = resident(setting, rank, role.name) | _idle_engine(setting)
        if stage >= 0:
            found = training_activations(role, stage, tokens, count, BYTES[role.dtype], setting.assumed)
            parts |= {f"{role.name} activations": found.layers, f"{role.name} logits": found.logits}
        return PhaseMemory(name, rank, parts, setting.available)

    return make


def _microbatch_tokens(setting: Setting, role: Role) -> int:
    return -(-setting.work.microbatch_tokens // role.layout.cp)


def pinned_bytes(setting: Setting, rank: int) -> int:
    """Pinned host memory of a rank: offloaded weights, and what asynchronous saves copy, its state and its share of the weights."""
    total = 0
    for role in setting.roles:
        state = state_bytes(role, rank)
        if role.offloaded:
            total += state.weights
        if role.trained and setting.cfg.checkpoint.async_save:
            share = -(-num_parameters(role.geometry) * BYTES[role.dtype] // role.layout.world_size)
            total += state.masters + state.moments + share
    return total
