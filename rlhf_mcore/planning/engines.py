"""Memory of engines: weights, cache and states of sequences on a rank."""

from __future__ import annotations

from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.questions import draws_greedy, sent_geometry
from rlhf_mcore.geometry import LatentSizes, ModelGeometry
from rlhf_mcore.planning.counts import Elements, elements, end_elements
from rlhf_mcore.planning.inputs import EngineGrid, PlanInputs, engine_grid, num_engines
from rlhf_mcore.planning.memory import BYTES, FP32

_FP8_WEIGHTS = 1.005  # bytes of an element, with the scales of rows, which are more than those of blocks


def engine_elements(geometry: ModelGeometry, grid: EngineGrid) -> Elements:
    """Estimate the elements of an engine rank's weights, of the stage that has most: an end and the most layers of a stage."""
    before, behind = end_elements(geometry, grid.tp, tied_head=grid.pp > 1)
    ends = before + behind if grid.pp == 1 else max(before, behind + before * grid.drafts)
    trunk = elements(geometry, range(geometry.num_layers), ends, grid.tp, grid.tp * grid.dp, 1)
    drafting = elements(geometry, geometry.mtp_numbers, 0.0, grid.tp, grid.tp * grid.dp, 1)
    share = _most_layers(grid, geometry.num_layers) / geometry.num_layers
    return Elements(ends, trunk.layers * share + drafting.layers, trunk.experts * share + drafting.experts)


def engine_bytes(geometry: ModelGeometry, grid: EngineGrid, dtype: str, quantization: str | None) -> int:
    """Estimate bytes of an engine rank's weights, or of those that it is sent: matrices of layers may have 8 bits and scales."""
    held, width = engine_elements(geometry, grid), BYTES[dtype]
    return int(width * held.ends + (width if quantization is None else _FP8_WEIGHTS) * held.in_layers)


def _most_layers(grid: EngineGrid, num_layers: int) -> int:
    """Count the layers of the stage that has most of them."""
    return -(-num_layers // grid.pp)


def kv_bytes_per_token(geometry: ModelGeometry, grid: EngineGrid, width: int) -> int:
    """Count bytes of a token's keys and values on a rank of the stage that has most.

    With latent attention they are of the latent alone, which is on every rank.
    """
    layers, attention = _most_layers(grid, geometry.num_attention_layers) + geometry.mtp_layers, geometry.attention
    if isinstance(attention, LatentSizes):
        return layers * (attention.kv_rank + attention.rope_dim) * width
    return 2 * layers * max(1, geometry.num_kv_heads // grid.tp) * geometry.head_dim * width


def state_bytes_per_sequence(geometry: ModelGeometry, grid: EngineGrid, width: int) -> int:
    """Count bytes that delta nets keep of a sequence of any length on an engine rank: fp32 states, last tokens of convolutions."""
    if (delta := geometry.delta) is None:
        return 0
    convolved = (delta.kernel - 1) * (2 * delta.keys + delta.values)
    states = FP32 * delta.values * delta.key_dim + width * convolved
    return _most_layers(grid, len(delta.layers)) * states // grid.tp


def engine_weights(inputs: PlanInputs) -> int:
    """Estimate bytes of the weights of a rank of the run's engines."""
    return held_bytes(inputs, sent_geometry(inputs.cfg, inputs.roles[0].geometry), engine_grid(inputs.cfg))


def held_bytes(inputs: PlanInputs, geometry: ModelGeometry, grid: EngineGrid) -> int:
    """Estimate bytes of the weights of a model on a rank of engines that are cut so."""
    rollout = inputs.cfg.rollout
    narrow = rollout.quantization if engine_kind(rollout.engine).holds_8_bits else None
    return engine_bytes(geometry, grid, inputs.dtype, narrow)


def kv_bytes(inputs: PlanInputs) -> int:
    """Count the bytes of a token's keys and values on one rank of an engine."""
    rollout = inputs.cfg.rollout
    width = engine_kind(rollout.engine).cache_width(rollout, BYTES[inputs.dtype])
    return kv_bytes_per_token(sent_geometry(inputs.cfg, inputs.roles[0].geometry), engine_grid(inputs.cfg), width)


def kv_tokens(inputs: PlanInputs) -> int:
    """Count the tokens that fit an engine's cache: into its share of the device, beside weights and one prefill.

    One that reserves no cache has no share: its cache is that of the longest responses that it decodes at a time.
    """
    rollout = inputs.cfg.rollout
    if not engine_kind(rollout.engine).reserves_cache:
        drawn = rollout.sampling.n + draws_greedy(inputs.cfg)
        rows = inputs.cfg.trainer.prompts_per_step * drawn // num_engines(inputs.cfg, inputs.world_size)
        return min(inputs.sequences, max(rows, 1)) * (longest(inputs) + state_tokens(inputs))
    budget = int(rollout.gpu_memory_utilization * inputs.gpu.memory_bytes) - engine_weights(inputs)
    budget -= _prefill_bytes(inputs)
    return max(0, budget // kv_bytes(inputs)) * engine_grid(inputs.cfg).dp


def state_tokens(inputs: PlanInputs) -> int:
    """Count the tokens of that cache that take as much as the states of a sequence's gated delta nets."""
    width = BYTES[inputs.dtype]
    return -(-state_bytes_per_sequence(inputs.roles[0].geometry, engine_grid(inputs.cfg), width) // kv_bytes(inputs))


def longest(inputs: PlanInputs) -> int:
    """Return the most tokens of a sequence."""
    return inputs.cfg.data.max_prompt_tokens + inputs.cfg.rollout.sampling.max_new_tokens


def _prefill_bytes(inputs: PlanInputs) -> int:
    """Estimate the step of 8192 tokens that vLLM profiles: hidden states, the widest MLP, fp32 logits of every running sequence."""
    geometry, layout = inputs.roles[0].geometry, inputs.cfg.rollout.layout
    routed = 0 if (e := geometry.experts) is None else e.ffn_size * e.per_token + e.shared_ffn_size
    widest = max(geometry.ffn_size, routed)
    hidden = 8192 * BYTES[inputs.dtype] * (4 * geometry.hidden_size + 3 * widest // layout.tp)
    return hidden + 4 * inputs.sequences * geometry.vocab_size
