"""Memory of engines on a rank: weights, cache and states of sequences."""

from __future__ import annotations

from rlhf_mcore.bridge.plan.sent_weights import sent_geometry
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.questions import draws_greedy
from rlhf_mcore.geometry import GroupedSizes, LatentSizes, ModelGeometry
from rlhf_mcore.planning.counts import Elements, elements, end_elements
from rlhf_mcore.planning.inputs import EngineGrid, PlanInputs, engine_grid, num_engines
from rlhf_mcore.planning.memory import BYTES, FP32

_FP8_WEIGHTS = 1.005  # bytes per element, with scales per row, which need more memory than scales per block


def engine_elements(geometry: ModelGeometry, grid: EngineGrid) -> Elements:
    """Estimate the weight elements of the largest engine rank: one end of the model and the most layers of a stage."""
    before, behind = end_elements(geometry, grid.tp, tied_head=grid.pp > 1)
    ends = before + behind if grid.pp == 1 else max(before, behind + before * grid.drafts)
    trunk = elements(geometry, range(geometry.num_layers), ends, grid.tp, grid.tp * grid.dp, 1)
    drafting = elements(geometry, geometry.mtp_numbers, 0.0, grid.tp, grid.tp * grid.dp, 1)
    share = _most_layers(grid, geometry.num_layers) / geometry.num_layers
    return Elements(ends, trunk.layers * share + drafting.layers, trunk.experts * share + drafting.experts)


def engine_bytes(geometry: ModelGeometry, grid: EngineGrid, dtype: str, quantization: str | None) -> int:
    """Estimate the weight bytes of an engine rank. With ``quantization``, layer matrices have 8 bits plus scales."""
    held, width = engine_elements(geometry, grid), BYTES[dtype]
    return int(width * held.ends + (width if quantization is None else _FP8_WEIGHTS) * held.in_layers)


def _most_layers(grid: EngineGrid, num_layers: int) -> int:
    """Count the layers of the largest stage."""
    return -(-num_layers // grid.pp)


def kv_bytes_per_token(geometry: ModelGeometry, grid: EngineGrid, width: int) -> int:
    """Count the bytes of a token's keys and values on a rank of the largest stage.

    Latent attention stores the latent only, on every rank.
    """

    def elements_of(attention: GroupedSizes | LatentSizes) -> int:
        if isinstance(attention, LatentSizes):
            return attention.kv_rank + attention.rope_dim
        return 2 * max(1, attention.num_kv_heads // grid.tp) * attention.head_dim

    each = [_most_layers(grid, len(layers)) * elements_of(attention) for attention, layers in geometry.attentions]
    kept = (sum(each) + geometry.mtp_layers * elements_of(geometry.attention)) * width
    return kept + _index_key_bytes(geometry, grid)


def _index_key_bytes(geometry: ModelGeometry, grid: EngineGrid) -> int:
    """Count the bytes of a token's keys of indexers. vLLM stores them in fp8, with an fp32 scale per 128 elements."""
    if not isinstance(geometry.attention, LatentSizes) or (indexer := geometry.attention.indexer) is None:
        return 0
    layers = geometry.num_layers - len(indexer.shared_layers)
    return (_most_layers(grid, layers) + geometry.mtp_layers) * (indexer.head_dim + FP32 * (indexer.head_dim // 128))


def state_bytes_per_sequence(geometry: ModelGeometry, grid: EngineGrid, width: int) -> int:
    """Count the bytes of a sequence's recurrent states on an engine rank, for any length: fp32 states, last convolution inputs."""
    if (delta := geometry.delta) is not None:
        layers, states = len(delta.layers), delta.values * delta.key_dim
        convolved = (delta.kernel - 1) * (2 * delta.keys + delta.values)
    elif (space := geometry.space) is not None:
        layers, states = geometry.count_layers("state_space"), space.inner * space.state_dim
        convolved = (space.kernel - 1) * sum(space.conv_sizes)
    else:
        return 0
    return _most_layers(grid, layers) * (FP32 * states + width * convolved) // grid.tp


def engine_weights(inputs: PlanInputs) -> int:
    """Estimate the weight bytes of a rank of the run's engines."""
    return held_bytes(inputs, sent_geometry(inputs.cfg, inputs.roles[0].geometry), engine_grid(inputs.cfg))


def held_bytes(inputs: PlanInputs, geometry: ModelGeometry, grid: EngineGrid) -> int:
    """Estimate the weight bytes of a model on an engine rank with this ``grid``."""
    rollout = inputs.cfg.rollout
    narrow = rollout.quantization if engine_kind(rollout.engine).holds_8_bits else None
    return engine_bytes(geometry, grid, inputs.dtype, narrow)


def kv_bytes(inputs: PlanInputs) -> int:
    """Count the bytes of a token's keys and values on one engine rank."""
    rollout = inputs.cfg.rollout
    width = engine_kind(rollout.engine).cache_width(rollout, BYTES[inputs.dtype])
    return kv_bytes_per_token(sent_geometry(inputs.cfg, inputs.roles[0].geometry), engine_grid(inputs.cfg), width)


def kv_tokens(inputs: PlanInputs) -> int:
    """Count the tokens that fit an engine's cache: its share of the device, minus weights and one prefill.

    An engine that reserves no cache has no share. Its cache then holds the longest responses that it decodes concurrently.
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
    """Count the cache tokens that need as much memory as the recurrent states of a sequence."""
    width = BYTES[inputs.dtype]
    return -(-state_bytes_per_sequence(inputs.roles[0].geometry, engine_grid(inputs.cfg), width) // kv_bytes(inputs))


def longest(inputs: PlanInputs) -> int:
    """Return the maximum number of tokens of a sequence."""
    return inputs.cfg.data.max_prompt_tokens + inputs.cfg.rollout.sampling.max_new_tokens


def _prefill_bytes(inputs: PlanInputs) -> int:
    """Estimate vLLM's profiling step of 8192 tokens: hidden states, the widest MLP, fp32 logits of every running sequence."""
    geometry, layout = inputs.roles[0].geometry, inputs.cfg.rollout.layout
    routed = 0 if (e := geometry.experts) is None else e.ffn_size * e.per_token + e.shared_ffn_size
    widest = max(geometry.ffn_size, routed)
    hidden = 8192 * BYTES[inputs.dtype] * (4 * geometry.hidden_size + 3 * widest // layout.tp)
    return hidden + 4 * inputs.sequences * geometry.vocab_size
