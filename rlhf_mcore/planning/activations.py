"""Bytes of activations that a pass keeps, after Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models
(arXiv 2205.05198), sections 4 and 5, for layers without dropout, with RMSNorm, gated MLPs and grouped queries.

Their equation 1 has 34 h + 5 a s bytes a token of a layer. Here dropout masks are gone, the 5 a s of the score matrix is never kept
(flash attention recomputes it; what stays is one fp32 number a head), queries, keys and values are n_q d + 2 n_kv d wide, and a gated
MLP with a fused activation keeps both halves and their product. Tensor parallelism divides what is inside of attention and MLP,
sequence parallelism (their section 4.2.2) the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import Assumptions, PlannedRole
from rlhf_mcore.types import ModelGeometry

# As parallel/logprobs.py has them, which imports torch: tokens of given logits, bytes of logits that an output layer makes.
CHUNK_TOKENS = 2048
CHUNK_BYTES = 512 * 2**20
_FP32 = 4


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
    """Peak of a forward and backward pass over microbatches of ``tokens`` tokens (this rank's part under context parallelism).

    ``width`` is the size of an activation's element in bytes.
    """
    layout, geometry = role.layout, role.geometry
    kept = full = 0.0
    for chunk in range(layout.vpp or 1):
        layers = layout.layers_of(geometry.num_layers, pp, chunk)
        kept += _chunk_bytes(role, layers, width, assumed)
        full = max([full, *(_layer_bytes(role, layer, width, assumed) for layer in layers)])
    in_flight = _in_flight(layout, pp, num_microbatches)
    # The activations of a recomputed unit exist while its backward pass runs.
    recompute = role.recompute
    unit = recompute.num_layers if recompute.method == "uniform" else 1
    recomputing = unit * full if recompute.granularity == "full" else 0.0
    recomputing += _backward_bytes(role, width)
    return ActivationBytes(
        int(tokens * (kept * in_flight + recomputing)), head_bytes(role, pp, tokens, width, training=True)
    )


def forward_activations(role: PlannedRole, pp: int, tokens: int, width: int, assumed: Assumptions) -> ActivationBytes:
    """Peak of a forward pass without gradients: one layer at a time, and the logits."""
    chunks = (role.layout.layers_of(role.geometry.num_layers, pp, chunk) for chunk in range(role.layout.vpp or 1))
    peak = max(_layer_bytes(role, layer, width, assumed) for layers in chunks for layer in layers)
    return ActivationBytes(int(tokens * peak), head_bytes(role, pp, tokens, width, training=False))


def _in_flight(layout: ParallelLayout, pp: int, num_microbatches: int) -> float:
    """How many microbatches' activations of all of its chunks a stage keeps at most (their section 4.2.3; 1F1B).

    Interleaved, the first stage keeps 1 + (p - 1) / (p v) times those of p microbatches, later ones two chunks less each.
    """
    stages, chunks = layout.pp, layout.vpp or 1
    if chunks == 1:
        return min(stages - pp, num_microbatches)
    return min(2 * (stages - pp - 1) + (chunks - 1) * stages + 1, num_microbatches * chunks) / chunks


def _chunk_bytes(role: PlannedRole, layers: range, width: int, assumed: Assumptions) -> float:
    """Bytes a token that one microbatch leaves behind in the layers of a chunk."""
    recompute = role.recompute
    whole = [_layer_bytes(role, layer, width, assumed) for layer in layers]
    if recompute.granularity != "full":
        return sum(whole)  # selective recomputation of core attention saves the score matrix, which is not kept anyway
    inputs = width * role.geometry.hidden_size / _sequence_share(role.layout)
    if recompute.method == "block":
        recomputed = min(recompute.num_layers, len(whole))
        return recomputed * inputs + sum(whole[recomputed:])
    return -(-len(whole) // recompute.num_layers) * inputs


def _sequence_share(layout: ParallelLayout) -> int:
    return layout.tp if layout.sequence_parallel else 1


def _layer_bytes(role: PlannedRole, layer: int, width: int, assumed: Assumptions) -> float:
    """Bytes a token of one whole layer."""
    geometry, layout = role.geometry, role.layout
    share = _sequence_share(layout)
    norms = 4 * geometry.hidden_size / share  # inputs and outputs of two norms
    mlp = _experts if geometry.is_moe_layer(layer) else _dense_mlp
    return (
        width * (norms + _attention(geometry) / layout.tp)
        + _FP32 * geometry.num_heads / layout.tp
        + mlp(role, width, assumed)
    )


def _attention(geometry: ModelGeometry) -> int:
    """Elements a token: the fused projection, queries and keys after the rotation (and before their norms), the output.

    With latent attention what is projected up, queries and keys put together from their parts, values, the output.
    """
    if geometry.kv_lora_rank:
        queries, values = geometry.num_heads * geometry.head_dim, geometry.num_heads * geometry.value_dim
        return 4 * queries + 3 * values
    queries, keys = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    has_norms = geometry.has_qk_norm or FAMILIES[geometry.family].megatron.get("qk_layernorm", False)
    rotated = (queries + keys) * (2 if has_norms else 1)
    return (queries + 2 * keys) + rotated + queries


def _dense_mlp(role: PlannedRole, width: int, assumed: Assumptions) -> float:
    """Gate and up halves, and the product, with a fused activation."""
    return width * 3 * role.geometry.ffn_size / role.layout.tp


def _backward_bytes(role: PlannedRole, width: int) -> float:
    """Bytes a token while a layer's MLP is gone through backwards: the gradients of three of its parts, and its input, gathered."""
    geometry, layout = role.geometry, role.layout
    routed = geometry.expert_ffn_size * geometry.experts_per_token * layout.expert_tp / _sequence_share(layout)
    widest = max(geometry.ffn_size / layout.tp, routed / layout.expert_tp)
    return width * (3 * widest + geometry.hidden_size)


def _experts(role: PlannedRole, width: int, assumed: Assumptions) -> float:
    """Router logits and probabilities in fp32, and of every token's copies the input, the gated product and the output.

    Of a shared expert the gated MLP, its output and, times its gate, once more.
    """
    geometry, layout = role.geometry, role.layout
    share = _sequence_share(layout)
    # With experts split over more ranks than tokens are, a rank sees the tokens of all of them.
    copies = role.geometry.experts_per_token * layout.expert_tp / share * assumed.expert_imbalance
    per_copy = 2 * geometry.hidden_size + 4 * geometry.expert_ffn_size / layout.expert_tp
    shared = 4 * geometry.shared_expert_ffn_size / layout.tp
    if shared:
        shared += 2 * geometry.hidden_size / share
    return width * (copies * per_copy + shared) + 2 * _FP32 * geometry.num_experts / share


def head_bytes(role: PlannedRole, pp: int, tokens: int, width: int, *, training: bool) -> int:
    """The last stage's logits as parallel/logprobs.py makes them: a chunk in fp32, its softmax, gradient and another copy.

    Logits of a microbatch that is no more than a chunk stay for the backward pass. Beyond that all tokens have their hidden states,
    in fp32 and in the model's own type, and while training their gradients.
    """
    if pp != role.layout.pp - 1:
        return 0
    norm = 2 * width * tokens * role.geometry.hidden_size // _sequence_share(role.layout)
    if role.geometry.head != "lm":
        return norm + 2 * _FP32 * tokens
    columns = role.geometry.padded_vocab(role.layout.tp) // role.layout.tp
    chunk_tokens = max(CHUNK_BYTES // (_FP32 * columns), 1)
    if tokens > chunk_tokens:
        hidden = (_FP32 + width) * tokens * role.geometry.hidden_size * (2 if training else 1)
        return norm + hidden + 4 * _FP32 * chunk_tokens * columns
    chunk = 4 * _FP32 * min(tokens, CHUNK_TOKENS) * columns  # scaled logits, log-probabilities, probabilities, gradient
    return norm + (2 if training else 1) * width * tokens * columns + chunk


def describe(recompute: RecomputeConfig) -> str:
    """In a few words, for tables."""
    if recompute.granularity != "full":
        return recompute.granularity
    return f"full/{recompute.method} {recompute.num_layers}"
