"""Bytes of one model on one rank: weights, gradients and optimizer state, and the activations of its passes.

State: Megatron's flat buffers contain every trained element in the width of weights and of gradients. Data-parallel ranks share
masters and moments. Buffer padding is not counted.

Activations: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198),
sections 4 and 5, for layers without dropout, with RMSNorm, gated MLPs and grouped queries. Their equation 1 has 34 h + 5 a s
bytes per token and layer. Here there are no dropout masks. The 5 a s of the score matrix is never kept, because flash
attention recomputes it and keeps one fp32 number per head. Queries, keys and values are n_q d + 2 n_kv d wide. A gated MLP
with a fused activation keeps both halves and their product. Tensor parallelism divides the tensors inside attention and MLP,
and sequence parallelism (their section 4.2.2) divides the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.expected_kernels import MAX_FLASH_SIZE
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.vision import MAX_PATCHES
from rlhf_mcore.geometry import DeltaSizes, LatentSizes, ModelGeometry, SpaceSizes
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import first_alike, stage_elements, tower_elements
from rlhf_mcore.planning.inputs import PlannedRole

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FP32 = 4
_INDEX = 8
_FP8 = 1 + FP32 / 128  # bytes per element, with a scale per 128 elements
# Copied from parallel/logprobs.py, which imports torch: bytes of fp32 logits per output-layer chunk and per softmax computation.
CHUNK_BYTES = 512 * 2**20
HOST_BUCKET = 1 << 25  # elements; copied from mcore/host_state.py, which has two slots of this size
SLICE_BYTES = 64 * 2**20
# Numbers of delta-net tensors with one element per key, per value, per token of a chunk, and per state element.
_DELTA_KEYS, _DELTA_VALUES, _DELTA_CHUNKS, _DELTA_STATES = 11, 8, 6, 3
# The same for state spaces: per input, per token of a chunk, per state element, and per projection of a group's states.
_SPACE_INPUTS, _SPACE_CHUNKS, _SPACE_STATES, _SPACE_PROJECTIONS = 16, 3, 3, 18
_CHUNK = 64  # tokens; copied from mcore/recurrence.py, which imports torch


# ------------------------------------------------------------------------------------------------------------------ state
@dataclass(frozen=True, slots=True)
class StateBytes:
    """The bytes that a model always uses on one rank. ``masters`` and ``moments`` count the rank's shard.

    ``hosted``: masters and moments in host memory, which the host steps. They are in no other field.
    """

    weights: int
    gradients: int = 0
    masters: int = 0
    moments: int = 0
    hosted: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def state_bytes(role: PlannedRole, rank: int) -> StateBytes:
    """Count the bytes of a model on a rank; zero if the rank holds no part of it."""
    if rank not in role.layout.ranks:
        return StateBytes(0)
    if role.adapters is not None:
        learned = state_bytes(replace(role, geometry=role.adapters, adapters=None), rank)
        weights = state_bytes(replace(role, trained=False, adapters=None), rank).weights
        return replace(learned, weights=learned.weights + weights)
    layout, width = role.layout, BYTES[role.dtype]
    stage = layout.coordinates(rank)["pp"]
    held = stage_elements(role.geometry, layout, stage)
    weights = int(width * held.total)
    if not role.trained:
        return StateBytes(weights)
    if stage == 0:
        held = replace(held, ends=held.ends - tower_elements(role.geometry, role.frozen))
    in_layers = held.layers / (layout.dp * layout.cp) + held.experts / layout.expert_dp
    owned = held.ends / (layout.dp * layout.cp) + in_layers
    # fp32 weights are their own masters. 16-bit masters are the bits that bf16 weights lack.
    masters = 0.0 if role.dtype == "fp32" else BYTES[role.state_dtype] * owned
    moments, stays = BYTES[role.state_dtype] * _num_moments(role, owned, in_layers), 1 - role.hosted
    gradients, hosted = int(_gradient_width(role) * held.total), int(role.hosted * (masters + moments))
    return StateBytes(weights, gradients, int(stays * masters), int(stays * moments), hosted)


def _num_moments(role: PlannedRole, owned: float, in_layers: float) -> float:
    """Count the numbers that an optimizer keeps in addition to masters. Muon keeps one per element of a layer matrix."""
    return {"adamw": 2 * owned, "muon": 2 * owned - in_layers, "sgd": owned}[role.optimizer]


def _gradient_width(role: PlannedRole) -> int:
    """Return the bytes per element of the gradient buffer."""
    return FP32 if role.megatron.get("grad_reduce_in_fp32", True) else BYTES[role.dtype]


def stepped_gradients(role: PlannedRole, rank: int) -> int:
    """Count the extra gradient bytes during the optimizer step. 16-bit gradients are copied to fp32, except for a 16-bit state."""
    copied = role.dtype != "fp32" and _gradient_width(role) < FP32 == BYTES[role.state_dtype]
    return state_bytes(replace(role, hosted=0.0), rank).masters if copied else 0


def staging_bytes(role: PlannedRole, rank: int) -> int:
    """Count the pinned bytes through which gradients and weights of a hosted optimizer state are copied."""
    hosted = state_bytes(role, rank).hosted // hosted_width(role)
    return 2 * (3 * FP32 if role.dtype == "fp32" else FP32 + BYTES[role.dtype]) * min(hosted, HOST_BUCKET)


def hosted_width(role: PlannedRole) -> int:
    """Return the bytes of an element's optimizer state on the host."""
    return 2 * FP32 if role.dtype == "fp32" else 3 * FP32


def copies_in_8_bits(role: PlannedRole, rank: int, *, training: bool) -> int:
    """Count the bytes of 8-bit copies of a rank's matrices for a pass: one copy, and a transposed copy if there are gradients."""
    if not role.fp8 or rank not in role.layout.ranks:
        return 0
    held = stage_elements(role.geometry, role.layout, role.layout.coordinates(rank)["pp"])
    return int(held.in_layers * (1 + training))


def weights_of_pass(role: PlannedRole, rank: int) -> int:
    """Count the peak weight bytes while a model runs. If layers are loaded one by one: two layers, and the rest of the model."""
    if not role.by_layer or rank not in role.layout.ranks:
        return state_bytes(role, rank).weights
    held = stage_elements(role.geometry, role.layout, role.layout.coordinates(rank)["pp"])
    return int(BYTES[role.dtype] * (held.ends + min(2 * held.largest_layer, held.in_layers)))


def checkpoint_bytes(role: PlannedRole) -> int:
    """Sum the bytes of a trained role's checkpoint: weights, moments, and masters of 16-bit weights.

    For a role with adapters, only the adapters are saved.
    """
    geometry = role.adapters or role.geometry
    whole = stage_elements(geometry, ParallelLayout(1), 0)
    learned = whole.total - tower_elements(geometry, role.frozen)
    masters = 0 if role.dtype == "fp32" else FP32
    moments = _num_moments(role, learned, whole.in_layers)
    return int(BYTES[role.dtype] * whole.total + masters * learned + FP32 * moments)


# ------------------------------------------------------------------------------------------------------------ activations
@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """The bytes that microbatches in flight keep on a pipeline rank, and the bytes that only logits need."""

    layers: int
    logits: int

    @property
    def total(self) -> int:
        return self.layers + self.logits


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of a model over microbatches of ``tokens`` tokens, which are a rank's part of its sequences.

    ``imbalance``: tokens of the busiest expert rank over their mean. ``copied_keys``: keys that attention copies per token.
    ``groups_experts``: one grouped product computes all experts of a rank.
    """

    role: PlannedRole
    tokens: int
    imbalance: float = 1.0
    copied_keys: float = 0.0
    groups_experts: bool = True

    @property
    def width(self) -> int:
        """Bytes per activation element."""
        return BYTES[self.role.dtype]

    @property
    def share(self) -> int:
        """Number of ranks that share the tensors which tensor parallelism does not divide."""
        return self.role.layout.tp if self.role.layout.sequence_parallel else 1

    @property
    def copies(self) -> float:
        """Copies per token for a rank's experts. If expert TP exceeds the token split, they include tokens of other ranks."""
        assert self.role.geometry.experts is not None
        return self.role.geometry.experts.per_token * self.role.layout.expert_tp / self.share * self.imbalance


def training_activations(run: Pass, pp: int, num_microbatches: int) -> ActivationBytes:
    """Estimate the peak of a forward and backward pass over microbatches on a pipeline rank.

    The peak is the sum of everything that microbatches keep, plus the largest of three successive items: the working memory
    of one layer, the logits, and the gradient of the embedding.
    """
    role, layout, geometry = run.role, run.role.layout, run.role.geometry
    kept = computing = 0.0
    for chunk in range(layout.vpp or 1):
        layers = [*layout.layers_of(geometry.num_layers, pp, chunk)]
        if (pp, chunk) == (layout.pp - 1, (layout.vpp or 1) - 1):
            if role.recompute.whole_layers:  # MTP layers are not recomputed
                kept += sum(_of_each(run, geometry.mtp_numbers, _layer_bytes))
            else:
                layers += geometry.mtp_numbers
        kept += _chunk_bytes(run, layers)
        computing = max([computing, *_of_each(run, layers, _computing_bytes)])
    in_flight, embedding = _in_flight(role, pp, num_microbatches), 0.0
    if pp == 0:  # the whole gradient in the width of weights; the kept activations are already free
        left = in_flight if role.recompute.whole_layers else max(in_flight - 1, 0)
        rows = geometry.padded_vocab(layout.tp) // layout.tp
        embedding = run.width * geometry.hidden_size * (rows + run.tokens) - run.tokens * kept * (in_flight - left)
    # The input from the previous stage, and the gradient from the next stage.
    passed_on = 2 * run.width * geometry.hidden_size / run.share if layout.pp > 1 else 0.0
    head = head_bytes(run, pp, training=True)
    return _peak(run.tokens * (kept * in_flight + passed_on), max(computing, embedding), head)


def forward_activations(run: Pass, pp: int) -> ActivationBytes:
    """Estimate the peak of a forward pass without gradients: one layer at a time, or the logits."""
    layout = run.role.layout
    chunks = (layout.layers_of(run.role.geometry.num_layers, pp, chunk) for chunk in range(layout.vpp or 1))
    layers = [layer for chunk in chunks for layer in chunk]
    return _peak(0.0, max(_of_each(run, layers, _forward_bytes)), head_bytes(run, pp, training=False))


def _peak(kept: float, layers: float, head: int) -> ActivationBytes:
    """Return the peak with the larger of logits and layer. Logits exist after the last forward pass, before any backward pass."""
    return ActivationBytes(int(kept), head) if head > layers else ActivationBytes(int(kept + layers), 0)


def _of_each(run: Pass, layers: Iterable[int], compute: Callable[[Pass, int], float]) -> list[float]:
    """Return a number for each layer. Layers of the same kind have the same number, which is computed once."""
    first, known = first_alike(run.role.geometry), dict[int, float]()
    kinds = [first[layer] for layer in layers]
    for kind in kinds:
        if kind not in known:
            known[kind] = compute(run, kind)
    return [known[kind] for kind in kinds]


def _in_flight(role: PlannedRole, pp: int, num_microbatches: int) -> float:
    """Return the maximum number of microbatches whose activations a stage keeps, in all its chunks (their section 4.2.3; 1F1B).

    With interleaving, the first stage keeps the activations of p microbatches times 1 + (p - 1) / (p v). Each later stage keeps
    two chunks less.
    """
    stages, chunks = role.layout.pp, role.layout.vpp or 1
    if chunks == 1:
        return min(stages - pp, num_microbatches)
    return min(2 * (stages - pp - 1) + (chunks - 1) * stages + 1, num_microbatches * chunks) / chunks


def _chunk_bytes(run: Pass, layers: list[int]) -> float:
    """Count the bytes per token that one microbatch keeps in the layers of a chunk, including the chunk's input and output."""
    recompute, whole = run.role.recompute, _of_each(run, layers, _layer_bytes)
    inputs = run.width * run.role.geometry.hidden_size / run.share
    if not recompute.whole_layers:
        return inputs + sum(whole) - sum(_of_each(run, layers, _dropped_bytes))
    if recompute.granularity == "block":
        recomputed = min(recompute.num_layers, len(whole))
        return (1 + recomputed) * inputs + sum(whole[recomputed:]) + _route_bytes(run, layers[:recomputed])
    return (1 + -(-len(whole) // recompute.num_layers)) * inputs + _route_bytes(run, layers)


def _route_bytes(run: Pass, layers: list[int]) -> float:
    """Count the bytes per token that dispatchers keep of recomputed layers: a map of experts, and an index per copy."""
    if (experts := run.role.geometry.experts) is None:
        return 0.0
    num_routed = sum(map(run.role.geometry.is_moe_layer, layers))
    return num_routed * (experts.count + _INDEX * experts.per_token) / run.share


def _layer_parts(run: Pass, layer: int) -> dict[str, float]:
    """Count the bytes per token that a layer keeps, by the names under which Megatron recomputes them; "" for no name.

    8-bit products keep only their 8-bit inputs and scales. Other operations keep 16-bit tensors: attention keeps its output,
    and in an MoE layer the router and the token dispatch keep the norm's output.
    """
    role, geometry, layout, width = run.role, run.role.geometry, run.role.layout, run.width
    hidden, input_width = geometry.hidden_size / run.share, _FP8 if role.fp8 else width
    mixer, behind = geometry.layer_kind(layer)
    sizes, family = geometry.attention_of(layer), FAMILIES[geometry.family]
    normed_output = width * hidden if family.norms == "both" else 0.0  # input of a second norm around each block
    attended = _FP8 * sizes.num_heads * sizes.value_dim / layout.tp if role.fp8 else 0.0
    parts = {"": 0.0, "layernorm": 0.0}
    if mixer != "none":
        # Input of the norm; cosines and sines for queries and for keys.
        angles = 4 * sizes.rope_dim * family.rotates
        parts[""] = width * (hidden + _attention(run, layer) / layout.tp + angles) + normed_output
        parts["layernorm"] = input_width * hidden
    if mixer not in ("none", "state_space"):
        parts[""] += attended
        parts["core_attn"] = FP32 * geometry.num_heads / layout.tp
    if behind == "none":
        return parts
    parts[""] += width * hidden + normed_output
    parts["layernorm"] += (width if behind == "moe" else input_width) * hidden
    # Tensors of the MLP's width: both halves, the activation unless it is fused, and the product. Without gates: the
    # input of the activation, and the tensor that is squared.
    is_fused = role.megatron.get("bias_activation_fusion", family.activation == "silu") or not family.has_gates
    wide = width * (2 if is_fused else 3)
    if geometry.experts is None or behind == "dense":
        return parts | {"mlp": (wide + input_width) * geometry.ffn_size / layout.tp}
    experts, copies = geometry.experts, run.copies
    copied = copies * (input_width * geometry.hidden_size + wide * experts.ffn_size / layout.expert_tp)
    parts["moe"] = copied + FP32 * (copies + 2 * experts.count / run.share)  # logits and probabilities
    parts["moe_act"] = input_width * copies * experts.ffn_size / layout.expert_tp
    if experts.shared_ffn_size:  # a gated MLP, its output, and its output times its gate
        mlp = (wide + input_width) * experts.shared_ffn_size / layout.tp
        parts["shared_experts"] = mlp + 2 * width * hidden + (_FP8 * hidden if role.fp8 else 0.0)
    return parts


def _layer_bytes(run: Pass, layer: int) -> float:
    """Count the bytes per token of one whole layer."""
    return sum(_layer_parts(run, layer).values())


def _dropped_bytes(run: Pass, layer: int) -> float:
    """Count the bytes per token that selective recomputation does not keep."""
    if run.role.recompute.granularity != "selective":
        return 0.0
    modules = set(run.role.recompute.modules)
    if "moe" in modules:
        modules |= {"moe_act", "shared_experts"}
    return sum(size for name, size in _layer_parts(run, layer).items() if name in modules)


def _attention(run: Pass, layer: int) -> float:
    """Count the elements per token: fused projection, rotated queries and keys, output, and copied keys and values.

    With latent attention: up-projections, queries and keys assembled from their parts, values, and the output.
    """
    geometry = run.role.geometry
    mixer = geometry.layer_kind(layer)[0]
    if mixer == "delta" and geometry.delta is not None:
        return delta_elements(geometry.delta)
    if mixer == "state_space" and geometry.space is not None:  # gates, and the outputs before and after them, too
        return exchanged_elements(geometry.space) + 3 * geometry.space.inner
    sizes = geometry.attention_of(layer)
    queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    values = sizes.num_kv_heads * sizes.value_dim
    copied = run.copied_keys * (keys + values)
    if isinstance(sizes, LatentSizes):
        return 4 * queries + 3 * values + copied
    if sizes.head_dim > MAX_FLASH_SIZE:  # keys and values of all tokens, repeated for each query head
        copied += 2 * queries * run.role.layout.cp
    return (queries + 2 * keys) + (queries + keys) + queries + copied


def delta_elements(delta: DeltaSizes) -> int:
    """Count the elements per token that enter and leave the heads of a gated delta net. Everything else is recomputed."""
    return 2 * delta.keys + 2 * delta.value_heads + 3 * delta.values


def exchanged_elements(space: SpaceSizes) -> int:
    """Count the elements per token that enter and leave the heads of a state space. Everything else is recomputed."""
    return sum(space.conv_sizes) + space.heads + space.inner


# ------------------------------------------------------------------------------------------- what exists only for a moment
def _forward_bytes(run: Pass, layer: int) -> float:
    is_moe = run.role.geometry.is_moe_layer(layer)
    return run.tokens * _layer_bytes(run, layer) + (_dispatch_bytes(run) + _stacked_bytes(run) if is_moe else 0.0)


def _computing_bytes(run: Pass, layer: int) -> float:
    """Estimate the peak bytes of a layer in addition to kept activations: recomputed activations and temporary tensors."""
    recompute, again = run.role.recompute, _dropped_bytes(run, layer)
    if recompute.whole_layers:  # the activations of a recomputed unit exist while its backward pass runs
        again = (recompute.num_layers if recompute.granularity == "full" else 1) * _layer_bytes(run, layer)
    mixer, behind = run.role.geometry.layer_kind(layer)
    own = _backward_bytes(run) if behind == "dense" else 0.0
    if behind == "moe":  # in addition to stacked weights, the gradients of all experts
        own = _dispatch_bytes(run) + 2 * _stacked_bytes(run)
    recurrence = _delta_bytes(run) if mixer == "delta" else _space_bytes(run) if mixer == "state_space" else 0.0
    return run.tokens * again + max(own, recurrence)


def _stacked_bytes(run: Pass) -> float:
    """Estimate the copy of a layer's first matrices of a rank's experts, which a grouped product reads (``mcore/grouped.py``)."""
    role, experts = run.role, run.role.geometry.experts
    assert experts is not None
    count = experts.count // role.layout.ep
    if count == 1 or not run.groups_experts or role.adapters is not None or role.dtype != "bf16":
        return 0.0
    return (
        run.width
        * count
        * _halves(role.geometry)
        * experts.ffn_size
        * role.geometry.hidden_size
        / role.layout.expert_tp
    )


def _halves(geometry: ModelGeometry) -> int:
    """Count the matrices of an MLP's first linear layer."""
    return 2 if FAMILIES[geometry.family].has_gates else 1


def _backward_bytes(run: Pass) -> float:
    """Return the larger of two sets of gradients in the backward pass of a dense MLP. Only one set exists at a time.

    The first set contains the gradients of the output and the halves; the product is already free. The second set contains
    the gradients of the halves, their weight and their input, plus the tensors that sequence parallelism gathers and scatters
    for them.
    """
    hidden, ffn = run.role.geometry.hidden_size, run.role.geometry.ffn_size / run.role.layout.tp
    gathered = hidden + 2 * hidden / run.share if run.share > 1 else 0.0
    halves = _halves(run.role.geometry)
    activation = run.tokens * (hidden + halves * ffn)
    weight = halves * hidden * ffn + run.tokens * (hidden + gathered - ffn)
    return run.width * max(activation, weight)


def _dispatch_bytes(run: Pass) -> float:
    """Count the bytes that an MoE layer holds after its computation.

    These are the token copies before and after the dispatch, the outputs of the experts, and these outputs in the order of
    the copies. Experts that are split over ranks sum them in fp32.
    """
    role, etp = run.role, run.role.layout.expert_tp
    sent, several = run.copies / etp, role.geometry.num_experts > role.layout.ep
    there = run.width * (2 * sent + (2 if several else 1) * run.copies)
    summed = FP32 * (run.copies + sent) if etp > 1 else 0.0
    return run.tokens * role.geometry.hidden_size * (there + summed)


def _delta_bytes(run: Pass) -> float:
    """Count the bytes that mcore/delta_net.py holds for a layer in its backward pass, in fp32.

    Queries and keys exist once per value head. With context parallelism, an exchange adds its message, the received message,
    and a copy in token order. The numbers come from a trace.
    """
    layout, delta = run.role.layout, run.role.geometry.delta
    assert delta is not None
    keys, values = delta.key_dim, delta.value_dim
    per_head = (
        _DELTA_KEYS * keys + _DELTA_VALUES * values + _DELTA_CHUNKS * _CHUNK + _DELTA_STATES * keys * values / _CHUNK
    )
    cp = layout.cp  # all tokens of some heads; ranks may have different numbers of heads
    heads = -(-delta.value_heads // layout.tp // cp) * cp
    exchanged = 3 * run.width * delta_elements(delta) / layout.tp if cp > 1 else 0.0
    return run.tokens * (FP32 * heads * per_head + exchanged)


def _space_bytes(run: Pass) -> float:
    """Count the bytes that mcore/state_space.py holds for a layer in its backward pass, like ``_delta_bytes``.

    Projections of states exist once per group. If context-parallel ranks share a group unevenly, they exist once per head.
    """
    layout, space = run.role.layout, run.role.geometry.space
    assert space is not None
    states, cp = space.head_dim * space.state_dim, layout.cp
    per_head = _SPACE_INPUTS * space.head_dim + _SPACE_CHUNKS * _CHUNK + _SPACE_STATES * states / _CHUNK
    heads, groups = -(-space.heads // layout.tp // cp) * cp, -(-space.groups // layout.tp // cp) * cp
    exchanged = 3 * run.width * exchanged_elements(space) / layout.tp if cp > 1 else 0.0
    return run.tokens * (FP32 * (heads * per_head + groups * _SPACE_PROJECTIONS * space.state_dim) + exchanged)


def head_bytes(run: Pass, pp: int, *, training: bool) -> int:
    """Count the bytes of the last stage's logits as in parallel/logprobs.py.

    One chunk of logits exists at a time, in the model's dtype; its gradient overwrites it. A softmax computation has the scaled
    logits and the exponentials of a part in fp32. Hidden states exist in fp32 and in the model's dtype.
    """
    role, tokens, width = run.role, run.tokens, run.width
    if pp != role.layout.pp - 1:
        return 0
    hidden = role.geometry.hidden_size
    norm = 2 * width * tokens * hidden // run.share
    if role.geometry.head != "lm":
        return norm + 2 * FP32 * tokens
    columns = role.geometry.padded_vocab(role.layout.tp) // role.layout.tp
    chunk = columns * min(tokens, max(CHUNK_BYTES // (FP32 * columns), 1))
    logits = width * chunk + 2 * min(FP32 * chunk, SLICE_BYTES)
    of_hidden = width * tokens * hidden if training else 0
    return norm + (FP32 + width) * tokens * hidden + logits + of_hidden


def tower_bytes(role: PlannedRole, pp: int) -> int:
    """Estimate the bytes of a tower that reads images: one block, and all block inputs if it is trained; 0 without a tower."""
    if (sizes := role.geometry.vision) is None or pp > 0:
        return 0
    vision, width = FAMILIES[role.geometry.family].vision, BYTES[role.dtype]
    assert vision is not None
    hidden = width * sizes.hidden_size
    block = 6 * hidden + 3 * width * sizes.ffn_size
    pixels = FP32 * sizes.channels * sizes.temporal_patch_size * sizes.patch_size**2
    learns = role.trained and any(rule.mcore not in role.frozen for rule in vision.rules(role.geometry))
    return MAX_PATCHES * (pixels + block + (sizes.depth * hidden + block if learns else 0))


def describe(recompute: RecomputeConfig) -> str:
    """Describe the recomputation in a few words, for tables."""
    return f"{recompute.granularity} {recompute.num_layers}" if recompute.whole_layers else recompute.granularity
