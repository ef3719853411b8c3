"""Rough times of the phases of a step, for comparing layouts: device peaks times assumed efficiencies, without measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rlhf_mcore.bridge.plan.sent_weights import sent_geometry
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.questions import draws_greedy
from rlhf_mcore.planning.counts import active_parameters, model_flops, mtp_flops
from rlhf_mcore.planning.engines import (
    engine_bytes,
    engine_elements,
    held_bytes,
    kv_bytes_per_token,
    kv_tokens,
    state_bytes_per_sequence,
    state_tokens,
)
from rlhf_mcore.planning.inputs import (
    PlanInputs,
    PlannedRole,
    Workload,
    engine_grid,
    engines_apart,
    forward_roles,
    num_devices,
    num_engines,
    rank_share,
)
from rlhf_mcore.planning.memory import (
    BYTES,
    FP32,
    delta_elements,
    exchanged_elements,
    hosted_width,
    state_bytes,
)
from rlhf_mcore.planning.phases import GENERATE, SYNC

FORWARD, TRAIN, TRAIN_RECOMPUTED = 1, 3, 4  # cost of a pass in forward passes
_HOST_UPDATE_BYTES = (
    34  # bytes per element on the host: gradient, state read and written, master read, 16-bit weight written
)


def phase_seconds(inputs: PlanInputs) -> dict[str, float]:
    """Estimate the seconds of every phase of a step, by the names of ``planning.phases``."""
    times: dict[str, float] = {}
    if run_kind(inputs.cfg).generates:
        times = {GENERATE: _generate(inputs), SYNC: sync_of(inputs).seconds}
    for role in forward_roles(inputs.cfg, inputs.roles):
        times[f"{role.name} forward"] = max(_pass(inputs, role, FORWARD), _copies_s(inputs, role))
    for role in inputs.roles:
        if role.trained:
            passes = TRAIN_RECOMPUTED if role.recompute.whole_layers else TRAIN
            seconds = role.epochs * _pass(inputs, role, passes) + optimizer_s(inputs, role)
            times[f"{role.name} update"] = seconds
    return times


@dataclass(frozen=True, slots=True)
class SyncEstimate:
    """The maximum number of bytes that an engine rank receives in a sync, whether they cross nodes, and the duration."""

    received: int
    crosses_nodes: bool
    seconds: float


def sync_of(inputs: PlanInputs) -> SyncEstimate:
    """Estimate a sync: all weights of an engine rank pass the slowest link of its replica.

    For disaggregated engines, the trainer's ranks send equal parts, to each machine once.
    """
    cfg, actor, gpu = inputs.cfg, inputs.roles[0], inputs.gpu
    layout, grid = actor.layout, engine_grid(cfg)
    received = engine_bytes(sent_geometry(cfg, actor.geometry), grid, actor.dtype, cfg.rollout.quantization)
    moved = received
    if engines_apart(cfg):
        engine_ranks = cfg.rollout.num_engines * grid.size
        spread = num_devices(cfg, layout.world_size) > gpu.per_node
        copies = grid.size * -(-engine_ranks // gpu.per_node) if spread else engine_ranks
        moved = max(moved, moved * copies // layout.world_size)
    else:
        spread = layout.world_size // (layout.dp * layout.cp) > gpu.per_node
    rate = gpu.network_bytes_per_s if spread else gpu.nvlink_bytes_per_s
    return SyncEstimate(received, spread, moved / (rate * inputs.assumed.link_efficiency))


def _generate(inputs: PlanInputs) -> float:
    """Estimate generation: one prefill per prompt, then decoding steps with as many sequences as exist or fit."""
    work, sampling = inputs.work, inputs.cfg.rollout.sampling
    drawn = sampling.n + draws_greedy(inputs.cfg)
    sequences = work.sequences * drawn / sampling.n / num_engines(inputs.cfg, inputs.world_size)
    running = max(1.0, min(sequences, most_running(inputs)))
    steps = max(sequences * work.response_tokens / running, float(sampling.max_new_tokens))
    prompts_s = prefill_token_s(inputs) * work.prompt_tokens * sequences / drawn
    # Responses have different lengths, so few sequences are decoded at the end of a step.
    mean_running = max(1.0, sequences * work.response_tokens / steps)
    return prompts_s + steps * decode_step_s(inputs, mean_running)


def most_running(inputs: PlanInputs) -> float:
    """Count the sequences that an engine decodes concurrently. Its cache limits them."""
    length = inputs.work.prompt_tokens + inputs.work.response_tokens + state_tokens(inputs)
    return max(1.0, min(inputs.sequences * inputs.cfg.rollout.layout.dp, kv_tokens(inputs) / length))


def prefill_token_s(inputs: PlanInputs) -> float:
    """Estimate an engine's seconds per prompt token."""
    # Stages wait for each other: vLLM runs one batch at a time if it did not start the ranks.
    grid = engine_grid(inputs.cfg)
    flops = grid.tp * grid.dp * inputs.gpu.bf16_flops * inputs.assumed.train_efficiency
    return 2 * active_parameters(inputs.roles[0].geometry) / flops


def decode_step_s(inputs: PlanInputs, running: float) -> float:
    """Estimate one decoding step of ``running`` sequences, limited by reading weights and cache, or by arithmetic."""
    actor, work, gpu, rollout = inputs.roles[0], inputs.work, inputs.gpu, inputs.cfg.rollout
    grid = replace(engine_grid(inputs.cfg), pp=1)  # its stages read one after another
    running, active = running / grid.dp, active_parameters(actor.geometry)
    trunk = actor.geometry.trunk  # without drafts, because their acceptance is unknown
    held = engine_elements(trunk, grid).total
    read = min(1.0, active * running / grid.tp / held) * held_bytes(inputs, trunk, grid)
    cached = engine_kind(rollout.engine).cache_width(rollout, BYTES[inputs.dtype])
    read += running * (work.prompt_tokens + work.response_tokens / 2) * kv_bytes_per_token(trunk, grid, cached)
    # States are read and written.
    read += running * 2 * state_bytes_per_sequence(actor.geometry, grid, BYTES[inputs.dtype])
    memory_s = read / (gpu.memory_bytes_per_s * inputs.assumed.decode_efficiency)
    compute_s = running * grid.dp * prefill_token_s(inputs)
    exchange_s = _reduce_s(
        inputs, grid.tp * grid.dp, running * actor.geometry.hidden_size * 2, actor.geometry.num_blocks
    )
    return max(memory_s, compute_s) + exchange_s


def _pass(inputs: PlanInputs, role: PlannedRole, passes: int) -> float:
    """Estimate all tokens of a step through a model: arithmetic, exchanges within layers, and the pipeline's bubble."""
    work, layout, gpu = inputs.work, role.layout, inputs.gpu
    efficiency = inputs.assumed.moe_efficiency if role.geometry.experts is not None else inputs.assumed.train_efficiency
    flops = passes * _forward_flops(role, work)
    if passes > FORWARD:  # MTP layers have a loss only, and are never recomputed as a whole
        mtp, length = mtp_flops(role.geometry), work.prompt_tokens + work.response_tokens
        flops += TRAIN * (mtp.token + mtp.logits + mtp.pair * length / 2) * work.tokens
    compute_s = flops / (layout.world_size * gpu.bf16_flops * efficiency)
    exchange_s = passes * sum(_exchanges(inputs, role, work.computed_tokens(role) / (layout.dp * layout.cp)))
    return (compute_s + exchange_s) / (1 - rank_share(work, role).bubble)


def _copies_s(inputs: PlanInputs, role: PlannedRole) -> float:
    """Estimate the time to copy layers from the host one by one, for every microbatch, in parallel with computation."""
    if not role.by_layer:
        return 0.0
    trainer, weights = inputs.cfg.trainer, state_bytes(role, role.layout.first_rank).weights
    limit = trainer.forward_tokens or 2 * trainer.max_tokens_per_microbatch
    count = max(1, -(-int(inputs.work.computed_tokens(role) / role.layout.dp) // limit))
    return count * weights / (inputs.gpu.host_bytes_per_s * inputs.assumed.link_efficiency)


def _forward_flops(role: PlannedRole, work: Workload) -> float:
    """Count the operations of a forward pass over a step's rows (prompt and response), with logits for all computed tokens."""
    flops, prompt, whole = model_flops(role.geometry), work.prompt_tokens, work.prompt_tokens + work.response_tokens
    pairs = work.sequences * flops.attention(np.float64(whole)) - work.shared_prompts(role) * flops.attention(
        np.float64(prompt)
    )
    return float((flops.token + flops.logits) * work.computed_tokens(role) + pairs)


def _exchanges(inputs: PlanInputs, role: PlannedRole, tokens: float) -> Iterator[float]:
    """Estimate the activation exchanges of a stage's ranks, in a forward pass over one rank's tokens."""
    geometry, layout = role.geometry, role.layout
    nbytes = tokens * geometry.hidden_size * BYTES[role.dtype]
    yield _reduce_s(inputs, layout.tp, nbytes, geometry.num_blocks / layout.pp)
    if layout.cp > 1:  # keys and values of the other ranks' tokens, without overlap
        rate = _link(inputs, layout.tp * layout.cp)
        element_s = tokens * (layout.cp - 1) * BYTES[role.dtype] / (layout.tp * layout.pp * rate)
        for sizes, each in geometry.attentions:
            yield len(each) * sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim) * element_s
        if (delta := geometry.delta) is not None:  # some heads of all tokens
            yield len(delta.layers) * delta_elements(delta) / layout.cp * element_s
        if (space := geometry.space) is not None:
            yield geometry.count_layers("state_space") * exchanged_elements(space) / layout.cp * element_s
    if geometry.experts is not None and layout.ep > 1:
        moved = nbytes / layout.tp * geometry.experts.per_token * (layout.ep - 1) / layout.ep
        yield 2 * len(geometry.moe_layers) / layout.pp * moved / _link(inputs, layout.ep * layout.expert_tp)
    if layout.pp > 1:
        yield nbytes / layout.tp / _link(inputs, layout.tp * layout.dp * layout.cp + 1)


def _reduce_s(inputs: PlanInputs, size: int, nbytes: float, count: float) -> float:
    """Estimate the seconds of ``count`` all-reduces over ``size`` neighbouring ranks."""
    return count * 2 * (size - 1) / size * nbytes / _link(inputs, size)


def _link(inputs: PlanInputs, group: int) -> float:
    """Return the bytes/s of a rank within a group of ``group`` consecutive ranks."""
    gpu = inputs.gpu
    rate = gpu.nvlink_bytes_per_s if group <= gpu.per_node else gpu.network_bytes_per_s
    return rate * inputs.assumed.link_efficiency


def optimizer_s(inputs: PlanInputs, role: PlannedRole) -> float:
    """Estimate the optimizer updates of a step: reduce-scatter gradients, update the shard, all-gather weights.

    An update reads a gradient and reads and writes the state. The host's copies and its update overlap.
    """
    layout, gpu, width = role.layout, inputs.gpu, BYTES[role.state_dtype]
    state = state_bytes(role, layout.first_rank)
    group = layout.tp * layout.cp * layout.dp
    exchange_s = (state.gradients + state.weights) / _link(inputs, group) if layout.dp * layout.cp > 1 else 0.0
    device_s = state.moments / (2 * width) * (FP32 + 6 * width) / gpu.memory_bytes_per_s
    hosted = state.hosted / hosted_width(role)
    copies_s = hosted * (FP32 + BYTES[role.dtype]) / (gpu.host_bytes_per_s * inputs.assumed.link_efficiency)
    host_s = max(copies_s, hosted * _HOST_UPDATE_BYTES / gpu.cpu_bytes_per_s)
    return role.updates * (exchange_s + device_s + host_s)
