"""Bytes of activations that a pass keeps, after Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models
(arXiv 2205.05198), sections 4 and 5, for layers without dropout, with RMSNorm, gated MLPs and grouped queries.

Their equation 1 has 34 h + 5 a s bytes a token of a layer. Here dropout masks are gone, the 5 a s of the score matrix is never kept
(flash attention recomputes it; what stays is one fp32 number a head), queries, keys and values are n_q d + 2 n_kv d wide, and a gated
MLP with a fused activation keeps both halves and their product. Tensor parallelism divides what is inside of attention and MLP,
sequence parallelism (their section 4.2.2) the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.vision import MAX_PATCHES
from rlhf_mcore.geometry import DeltaSizes, LatentSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import Assumptions, PlannedRole

# As parallel/logprobs.py has them, which imports torch: tokens of given logits, bytes of logits that an output layer makes.
CHUNK_TOKENS = 2048
CHUNK_BYTES = 512 * 2**20
_FP32 = 4
_FP8 = 1 + _FP32 / 128  # of an element, with a scale for each 128
# Tensors of a gated delta net with an element for each number of a key, a value, a token of a chunk, and a state.
_DELTA_KEYS, _DELTA_VALUES, _DELTA_CHUNKS, _DELTA_STATES = 11, 8, 6, 3


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Of one microbatch size on one pipeline rank: what microbatches in flight keep, and what only the last layer needs."""

    layers: int
    logits: int

    @property
    def total(self) -> int:
        return self.layers + self.logits


def training_activations(
    role: PlannedRole, pp: int, tokens: int, num_microbatches: int, width: int, assumed: Assumptions
) -> ActivationBytes:
    """Estimate the peak of a forward and backward pass over microbatches of ``tokens`` tokens (a rank's part of a sequence).

    The peak is the sum of all that microbatches keep and the largest of three, one after the other: the working memory of one layer,
    the logits, and the gradient of the embedding. ``width`` is the size of an activation's element in bytes.
    """
    layout, geometry = role.layout, role.geometry
    kept = computing = 0.0
    for chunk in range(layout.vpp or 1):
        layers = [*layout.layers_of(geometry.num_layers, pp, chunk)]
        if (pp, chunk) == (layout.pp - 1, (layout.vpp or 1) - 1):
            if role.recompute.granularity == "full":  # MTP layers are not recomputed
                kept += sum(_layers_bytes(role, geometry.mtp_numbers, width, assumed))
            else:
                layers += geometry.mtp_numbers
        kept += _chunk_bytes(role, layers, width, assumed)
        computing = max(
            [computing, *_of_each(geometry, layers, lambda one: _computing_bytes(role, one, tokens, width, assumed))]
        )
    in_flight = _in_flight(layout, pp, num_microbatches)
    head = head_bytes(role, pp, tokens, width, training=True)
    embedding = 0.0
    if pp == 0:  # its gradient is whole, in the width of weights, and what the microbatch kept is free by then
        left = in_flight if role.recompute.granularity == "full" else max(in_flight - 1, 0)
        rows = geometry.padded_vocab(layout.tp) // layout.tp
        embedding = width * geometry.hidden_size * (rows + tokens) - tokens * kept * (in_flight - left)
    # What comes from the stage before, and the gradient from the one behind.
    passed_on = 2 * width * geometry.hidden_size / _sequence_share(layout) if layout.pp > 1 else 0.0
    return _peak(tokens * (kept * in_flight + passed_on), max(computing, embedding), head)


def tower_bytes(role: PlannedRole, pp: int, width: int) -> int:
    """Estimate what a tower needs while it reads images: of one block, and of all blocks' inputs where it learns; 0 without one."""
    if (sizes := role.geometry.vision) is None or pp > 0:
        return 0
    vision, hidden = FAMILIES[role.geometry.family].vision, width * sizes.hidden_size
    assert vision is not None
    block = 6 * hidden + 3 * width * sizes.ffn_size
    pixels = _FP32 * sizes.channels * sizes.temporal_patch_size * sizes.patch_size**2
    learns = role.trained and any(rule.mcore not in role.frozen for rule in vision.rules(role.geometry))
    return MAX_PATCHES * (pixels + block + (sizes.depth * hidden + block if learns else 0))


def _peak(kept: float, layers: float, head: int) -> ActivationBytes:
    """Take the larger of logits and layer: logits are made after the last forward pass, and freed before a layer's backward pass."""
    return ActivationBytes(int(kept), head) if head > layers else ActivationBytes(int(kept + layers), 0)


def _computing_bytes(role: PlannedRole, layer: int, tokens: int, width: int, assumed: Assumptions) -> float:
    """Estimate the most that a layer needs beside what is kept: what it computes again, and what exists for a moment only."""
    geometry, recompute = role.geometry, role.recompute
    again = 0.0
    if recompute.granularity == "full":  # the activations of a recomputed unit exist while its backward pass runs
        again = (recompute.num_layers if recompute.method == "uniform" else 1) * _layer_bytes(
            role, layer, width, assumed
        )
    elif recompute.granularity == "selective":
        again = _dropped_bytes(role, layer, width, assumed)
    own = _dispatch_bytes if geometry.is_moe_layer(layer) else _backward_bytes
    return tokens * again + max(own(role, tokens, width, assumed), _delta_bytes(role, layer, tokens, width))


def _delta_bytes(role: PlannedRole, layer: int, tokens: int, width: int) -> float:
    """Count what mcore/delta_net.py holds of a layer in its backward pass, in fp32.

    Queries and keys are there once for each head of values. Under context parallelism an exchange adds its message, the received one,
    and a copy in the order of the tokens. Counted by tracing it.
    """
    geometry = role.geometry
    if (delta := geometry.delta) is None or layer not in delta.layers:
        return 0.0
    keys, values, chunk = delta.key_dim, delta.value_dim, 64
    per_head = (
        _DELTA_KEYS * keys + _DELTA_VALUES * values + _DELTA_CHUNKS * chunk + _DELTA_STATES * keys * values / chunk
    )
    cp = role.layout.cp  # all tokens of some of the heads, which may not be equally many on all ranks
    heads = -(-delta.value_heads // role.layout.tp // cp) * cp
    exchanged = 3 * width * delta_elements(delta) / role.layout.tp if cp > 1 else 0.0
    return tokens * (_FP32 * heads * per_head + exchanged)


def forward_activations(role: PlannedRole, pp: int, tokens: int, width: int, assumed: Assumptions) -> ActivationBytes:
    """Estimate the peak of a forward pass without gradients: one layer at a time, and the logits."""
    chunks = (role.layout.layers_of(role.geometry.num_layers, pp, chunk) for chunk in range(role.layout.vpp or 1))
    layers = [layer for chunk in chunks for layer in chunk]
    peak = max(_of_each(role.geometry, layers, lambda one: _forward_bytes(role, one, tokens, width, assumed)))
    return _peak(0.0, peak, head_bytes(role, pp, tokens, width, training=False))


def _forward_bytes(role: PlannedRole, layer: int, tokens: int, width: int, assumed: Assumptions) -> float:
    is_moe = role.geometry.is_moe_layer(layer)
    sent = _dispatch_bytes(role, tokens, width, assumed) if is_moe else 0.0
    return tokens * _layer_bytes(role, layer, width, assumed) + sent


def _in_flight(layout: ParallelLayout, pp: int, num_microbatches: int) -> float:
    """Count the microbatches whose activations of all its chunks a stage keeps at most (their section 4.2.3; 1F1B).

    Interleaved, the first stage keeps 1 + (p - 1) / (p v) times those of p microbatches, later ones two chunks less each.
    """
    stages, chunks = layout.pp, layout.vpp or 1
    if chunks == 1:
        return min(stages - pp, num_microbatches)
    return min(2 * (stages - pp - 1) + (chunks - 1) * stages + 1, num_microbatches * chunks) / chunks


def _chunk_bytes(role: PlannedRole, layers: Sequence[int], width: int, assumed: Assumptions) -> float:
    """Count the bytes a token that one microbatch leaves behind in the layers of a chunk, its input and output among them."""
    recompute = role.recompute
    whole = _layers_bytes(role, layers, width, assumed)
    inputs = width * role.geometry.hidden_size / _sequence_share(role.layout)
    if recompute.granularity != "full":
        if recompute.granularity != "selective":
            return inputs + sum(whole)
        dropped = _of_each(role.geometry, layers, lambda layer: _dropped_bytes(role, layer, width, assumed))
        return inputs + sum(whole) - sum(dropped)
    if recompute.method == "block":
        recomputed = min(recompute.num_layers, len(whole))
        return (1 + recomputed) * inputs + sum(whole[recomputed:])
    return (1 + -(-len(whole) // recompute.num_layers)) * inputs


def _of_each(geometry: ModelGeometry, layers: Iterable[int], compute: Callable[[int], float]) -> list[float]:
    """Return a number for each layer. Layers of one kind have the same: it is computed once."""
    known: dict[tuple[bool, bool], float] = {}
    numbers, kinds = [], _layer_kinds(geometry)
    for layer in layers:
        kind = kinds[layer]
        if kind not in known:
            known[kind] = compute(layer)
        numbers.append(known[kind])
    return numbers


@lru_cache(maxsize=64)
def _layer_kinds(geometry: ModelGeometry) -> list[tuple[bool, bool]]:
    return [geometry.layer_kind(layer) for layer in range(geometry.num_layers + geometry.mtp_layers)]


def _sequence_share(layout: ParallelLayout) -> int:
    return layout.tp if layout.sequence_parallel else 1


def _layers_bytes(role: PlannedRole, layers: Iterable[int], width: int, assumed: Assumptions) -> list[float]:
    return _of_each(role.geometry, layers, lambda layer: _layer_bytes(role, layer, width, assumed))


def _layer_bytes(role: PlannedRole, layer: int, width: int, assumed: Assumptions) -> float:
    """Count the bytes a token of one whole layer."""
    geometry, layout = role.geometry, role.layout
    share = _sequence_share(layout)
    norms = 4 * geometry.hidden_size / share  # inputs and outputs of two norms
    mlp = _experts if geometry.is_moe_layer(layer) else _dense_mlp
    rotation = 4 * geometry.attention.rope_dim  # cosines and sines, of queries and of keys
    return (
        width * (norms + _attention(geometry, layer) / layout.tp + rotation)
        + _FP32 * geometry.num_heads / layout.tp
        + mlp(role, width, assumed)
        + (_change_by_fp8(role, layer, width, assumed) if role.fp8 else 0.0)
    )


def _change_by_fp8(role: PlannedRole, layer: int, width: int, assumed: Assumptions) -> float:
    """Count the bytes a token that a layer keeps more, or less: of inputs of products only their 8 bits and scales are kept.

    What attention returns it keeps itself, so that its 8 bits are more. In a mixture the router and the copying of tokens keep the
    norm's output as it is. What selective recomputation drops is not counted as less once more.
    """
    geometry, layout, recompute = role.geometry, role.layout, role.recompute
    dropped = set(recompute.modules) if recompute.granularity == "selective" else set()
    normed, less = geometry.hidden_size / _sequence_share(layout), _FP8 - width
    attended = _FP8 * geometry.num_heads * geometry.attention.value_dim / layout.tp
    of_norm, experts = 0.0 if "layernorm" in dropped else less * normed, geometry.experts
    if experts is None or not geometry.is_moe_layer(layer):
        of_mlp = 0.0 if "mlp" in dropped else less * geometry.ffn_size / layout.tp
        return 2 * of_norm + of_mlp + attended
    of_shared, per_copy = 0.0, geometry.hidden_size + experts.ffn_size / layout.expert_tp
    if experts.shared_ffn_size:
        of_shared = _FP8 * normed + less * experts.shared_ffn_size / layout.tp
    of_mlp = (
        0.0 if dropped & {"moe", "moe_act", "shared_experts"} else less * _copies(role, assumed) * per_copy + of_shared
    )
    return of_norm + of_mlp + attended


def _dropped_bytes(role: PlannedRole, layer: int, width: int, assumed: Assumptions) -> float:
    """Count the bytes a token of a layer that selective recomputation does not keep.

    Of the core of attention that is next to nothing: its score matrix is not kept anyway.
    """
    geometry, layout, modules = role.geometry, role.layout, role.recompute.modules
    experts, dropped = geometry.experts if geometry.is_moe_layer(layer) else None, 0.0
    if "core_attn" in modules:
        dropped += _FP32 * geometry.num_heads / layout.tp
    if "layernorm" in modules:
        dropped += width * 2 * geometry.hidden_size / _sequence_share(layout)
    if "mlp" in modules and experts is None:
        dropped += _dense_mlp(role, width, assumed)
    if "moe" in modules and experts is not None:
        return dropped + _experts(role, width, assumed)
    if "moe_act" in modules and experts is not None:
        dropped += width * _copies(role, assumed) * experts.ffn_size / layout.expert_tp
    if "shared_experts" in modules and experts is not None:
        dropped += width * 3 * experts.shared_ffn_size / layout.tp
    return dropped


def _attention(geometry: ModelGeometry, layer: int) -> int:
    """Count elements a token: the fused projection, queries and keys after the rotation, the output.

    With latent attention what is projected up, queries and keys put together from their parts, values, the output.
    """
    if geometry.delta is not None and layer in geometry.delta.layers:
        return delta_elements(geometry.delta)
    if isinstance(geometry.attention, LatentSizes):
        queries, values = geometry.num_heads * geometry.head_dim, geometry.num_heads * geometry.value_dim
        return 4 * queries + 3 * values
    queries, keys = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    return (queries + 2 * keys) + (queries + keys) + queries


def delta_elements(delta: DeltaSizes) -> int:
    """Count what goes into the heads of a gated delta net and comes out, of a token; the rest is computed again."""
    return 2 * delta.keys + 2 * delta.value_heads + 3 * delta.values


def _dense_mlp(role: PlannedRole, width: int, assumed: Assumptions) -> float:
    """Count elements a token: gate and up halves, and the product, with a fused activation."""
    return width * 3 * role.geometry.ffn_size / role.layout.tp


def _backward_bytes(role: PlannedRole, tokens: int, width: int, assumed: Assumptions) -> float:
    """Take the larger of the two sets of gradients that are there at a time in the backward pass of a dense MLP.

    One has the gradients of the output and the halves; the product is free by then. The other has those of the halves, of their
    weight and of their input, with what sequence parallelism gathers and scatters for them.
    """
    hidden, ffn = role.geometry.hidden_size, role.geometry.ffn_size / role.layout.tp
    share = _sequence_share(role.layout)
    gathered = hidden + 2 * hidden / share if share > 1 else 0.0
    activation = tokens * (hidden + 2 * ffn)
    weight = 2 * hidden * ffn + tokens * (hidden + gathered - ffn)
    return width * max(activation, weight)


def _copies(role: PlannedRole, assumed: Assumptions) -> float:
    """Count the copies of each token for the experts of a rank.

    Where experts are split over more ranks than tokens, it sees those of all.
    """
    assert role.geometry.experts is not None
    share = _sequence_share(role.layout)
    return role.geometry.experts.per_token * role.layout.expert_tp / share * assumed.expert_imbalance


def _experts(role: PlannedRole, width: int, assumed: Assumptions) -> float:
    """Count router logits and probabilities in fp32, and of every token's copies the sorted input, both halves and their product.

    Of a shared expert the gated MLP, its output and, times its gate, once more.
    """
    geometry, experts, layout = role.geometry, role.geometry.experts, role.layout
    assert experts is not None
    share = _sequence_share(layout)
    per_copy = geometry.hidden_size + 3 * experts.ffn_size / layout.expert_tp
    shared = 3 * experts.shared_ffn_size / layout.tp
    if shared:
        shared += 2 * geometry.hidden_size / share
    copies = _copies(role, assumed)
    return width * (copies * per_copy + shared) + _FP32 * (copies + 2 * experts.count / share)


def _dispatch_bytes(role: PlannedRole, tokens: int, width: int, assumed: Assumptions) -> float:
    """Count what a mixture holds when it has computed.

    These are its tokens' copies before and after they were sent, the experts' outputs, and the outputs in the order of the copies.
    Experts that are split over ranks add these up in fp32.
    """
    hidden, etp = role.geometry.hidden_size, role.layout.expert_tp
    copies = _copies(role, assumed)
    sent, several = copies / etp, role.geometry.num_experts > role.layout.ep
    there = width * (2 * sent + (2 if several else 1) * copies)
    return tokens * hidden * (there + (_FP32 * (copies + sent) if etp > 1 else 0))


def head_bytes(role: PlannedRole, pp: int, tokens: int, width: int, *, training: bool) -> int:
    """Count the last stage's logits as parallel/logprobs.py makes them, in fp32: scaled, exponentials, two more for entropies.

    Of a microbatch that is no more than a chunk they stay, and become their gradient: in the model's own type beside that of the
    weight. Beyond that a chunk has them at a time. Hidden states are there in fp32 and in the model's own type.
    """
    if pp != role.layout.pp - 1:
        return 0
    hidden = role.geometry.hidden_size
    norm = 2 * width * tokens * hidden // _sequence_share(role.layout)
    if role.geometry.head != "lm":
        return norm + 2 * _FP32 * tokens
    columns = role.geometry.padded_vocab(role.layout.tp) // role.layout.tp
    chunk_tokens = max(CHUNK_BYTES // (_FP32 * columns), 1)
    is_kept = tokens <= chunk_tokens
    softmax_tokens = min(tokens, CHUNK_TOKENS) if is_kept else chunk_tokens
    logits = _FP32 * columns * (min(tokens, chunk_tokens) + 3 * softmax_tokens)
    if training:
        at_a_time = min(tokens, chunk_tokens)
        backwards = (_FP32 + width) * at_a_time * columns + width * hidden * (columns + tokens)
        logits = max(logits, backwards)
    return norm + (_FP32 + width) * tokens * hidden + logits


def describe(recompute: RecomputeConfig) -> str:
    """Describe the recomputation in a few words, for tables."""
    if recompute.granularity != "full":
        return recompute.granularity
    return f"full/{recompute.method} {recompute.num_layers}"
