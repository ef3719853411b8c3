"""Rough times of the phases of a step, for comparing layouts. Peaks of the device times assumed efficiencies; nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mcore.config.derive import is_supervised
from rlhf_mcore.planning.batches import Workload, cut
from rlhf_mcore.planning.engine import engine_numel, kv_bytes_per_token
from rlhf_mcore.planning.memory import GENERATE, SYNC, Setting, kv_tokens
from rlhf_mcore.planning.roles import Role
from rlhf_mcore.planning.weights import BYTES, active_parameters, state_bytes

FORWARD, TRAIN, TRAIN_RECOMPUTED = 1, 3, 4  # forward passes that a pass is worth
_UPDATE_BYTES = 28  # an element of the optimizer: gradient, master and two moments read, three written


def phase_seconds(setting: Setting, sync_s: float) -> dict[str, float]:
    """Seconds of every phase of a step, by the names of ``memory.phases``."""
    times: dict[str, float] = {}
    if not is_supervised(setting.cfg):
        times = {GENERATE: _generate(setting), SYNC: sync_s}
        times |= {f"{role.name} forward": _pass(setting, role, FORWARD) for role in setting.roles}
    for role in setting.roles:
        if role.trained:
            passes = TRAIN_RECOMPUTED if role.recompute.granularity == "full" else TRAIN
            seconds = role.epochs * _pass(setting, role, passes) + role.updates * _step(setting, role)
            times[f"{role.name} update"] = seconds
    return times


def _generate(setting: Setting) -> float:
    """Decoding is bound by reading weights and cache or by arithmetic; the cache limits how many sequences run at a time."""
    actor, work, gpu = setting.roles[0], setting.work, setting.gpu
    rollout = setting.cfg.rollout
    tp, length = rollout.layout.tp, work.prompt_tokens + work.response_tokens
    sequences = work.sequences * tp / setting.world_size
    running = max(1.0, min(sequences, rollout.max_num_seqs, kv_tokens(setting) / length))
    active = active_parameters(actor.geometry, actor.experts_per_token)
    read = min(engine_numel(actor.geometry, tp), active * running / tp) * BYTES[setting.dtype]
    read += (
        running
        * (work.prompt_tokens + work.response_tokens / 2)
        * kv_bytes_per_token(actor.geometry, tp, BYTES[setting.dtype])
    )
    memory_s = read / (gpu.memory_bytes_per_s * setting.assumed.decode_efficiency)
    compute_s = 2 * active * running / (tp * gpu.bf16_flops * setting.assumed.train_efficiency)
    exchange_s = _reduce_s(setting, tp, running * actor.geometry.hidden_size * 2, 2 * actor.geometry.num_layers)
    steps = max(sequences * work.response_tokens / running, float(rollout.sampling.max_new_tokens))
    prompt_flops = 2 * active * work.prompt_tokens * sequences / rollout.sampling.n
    prompts_s = prompt_flops / (tp * gpu.bf16_flops * setting.assumed.train_efficiency)
    return prompts_s + steps * (max(memory_s, compute_s) + exchange_s)


def _pass(setting: Setting, role: Role, passes: int) -> float:
    """All tokens of a step through a model: arithmetic, exchanges within layers, and the pipeline's bubble."""
    work, layout, gpu = setting.work, role.layout, setting.gpu
    efficiency = setting.assumed.moe_efficiency if role.experts_per_token else setting.assumed.train_efficiency
    flops = passes * _flops_per_token(role, work) * work.tokens
    compute_s = flops / (layout.world_size * gpu.bf16_flops * efficiency)
    exchange_s = passes * sum(_exchanges(setting, role, work.tokens / (layout.dp * layout.cp)))
    return (compute_s + exchange_s) / (1 - cut(work, role).bubble)


def _flops_per_token(role: Role, work: Workload) -> float:
    """Forward pass: twice the parameters a token meets, and attention to half of the sequence on average."""
    geometry = role.geometry
    length = work.prompt_tokens + work.response_tokens
    attention = 2 * geometry.num_layers * geometry.num_heads * geometry.head_dim * length
    return 2 * active_parameters(geometry, role.experts_per_token) + attention


def _exchanges(setting: Setting, role: Role, tokens: float) -> Iterator[float]:
    """Seconds of a forward pass of one data-parallel rank's tokens in which a stage's ranks exchange activations."""
    geometry, layout = role.geometry, role.layout
    layers = geometry.num_layers / layout.pp
    nbytes = tokens * geometry.hidden_size * BYTES[role.dtype]
    yield _reduce_s(setting, layout.tp, nbytes, 2 * layers)
    if geometry.num_experts and layout.ep > 1:
        moved = nbytes / layout.tp * role.experts_per_token * (layout.ep - 1) / layout.ep
        yield 2 * layers * moved / _link(setting, layout.ep * layout.expert_tp)
    if layout.pp > 1:
        yield nbytes / layout.tp / _link(setting, layout.tp * layout.dp * layout.cp + 1)


def _reduce_s(setting: Setting, size: int, nbytes: float, count: float) -> float:
    """Seconds of ``count`` all-reduces over ``size`` neighbouring ranks."""
    return count * 2 * (size - 1) / size * nbytes / _link(setting, size)


def _link(setting: Setting, group: int) -> float:
    """Bytes/s of a rank within a group of so many consecutive ranks."""
    gpu = setting.gpu
    rate = gpu.nvlink_bytes_per_s if group <= gpu.per_node else gpu.network_bytes_per_s
    return rate * setting.assumed.link_efficiency


def _step(setting: Setting, role: Role) -> float:
    """One optimizer update: gradients scattered in fp32, the shard stepped, weights gathered."""
    layout = role.layout
    state = state_bytes(role, layout.first_rank)
    group = layout.tp * layout.cp * layout.dp
    exchange_s = (state.gradients + state.weights) / _link(setting, group) if layout.dp * layout.cp > 1 else 0.0
    return exchange_s + state.moments / 8 * _UPDATE_BYTES / setting.gpu.memory_bytes_per_s
