"""The sizes of a model, and the part of its tensors that a rank stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.masters import SplitMaster

# The block that mixes tokens: attention (wide: ``WideSizes``), a recurrent layer, or attention to the keys of an indexer,
# or to shared keys.
Mixer = Literal["attention", "wide", "delta", "state_space", "indexed", "shared", "none"]
Behind = Literal["dense", "moe", "none"]  # an MLP or experts
Block = Literal["attention", "state_space", "dense", "moe"]
LayerKind = tuple[Mixer, Behind]


@dataclass(frozen=True, slots=True)
class GroupedSizes:
    """Attention in which groups of query heads share a head of keys and values (Ainslie et al. 2023, arXiv 2305.13245)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool = (
        False  # for families where config.json decides; other families always have norms of query and key heads
    )
    has_qkv_bias: bool = False  # the same for biases of queries, keys and values

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        return self.head_dim


@dataclass(frozen=True, slots=True)
class WideSizes:
    """Attention with other heads in some layers: in Gemma 4, in the layers that attend to all tokens."""

    layers: tuple[int, ...]
    heads: GroupedSizes
    keys_are_values: bool  # values are projected keys, before their norm and rotation


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """Sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2): an indexer selects the keys that a token attends to."""

    num_heads: int
    head_dim: int
    top_k: int  # selected keys of a token; shorter sequences are attended to as a whole
    learns: bool = False  # whether indexers are trained
    shared_layers: tuple[int, ...] = ()  # layers without an indexer: they use the last indexer's keys before them


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): keys and values are projected from a latent."""

    num_heads: int
    head_dim: int  # elements of a query and of a key
    rope_dim: int  # the elements of ``head_dim`` with a rotation
    value_dim: int
    kv_rank: int
    q_rank: int = 0  # size of the latent of queries; 0: queries are projected directly
    indexer: IndexerSizes | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Gated delta nets (Yang et al. 2024, arXiv 2412.06464), which replace attention in some layers."""

    layers: tuple[int, ...]
    key_heads: int  # also the number of query heads
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # number of tokens in the kernel of the convolution

    @property
    def keys(self) -> int:
        """Return the number of elements of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Return the number of elements of the values of all heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class SpaceSizes:
    """State spaces of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), which replace attention in some layers."""

    heads: int
    head_dim: int
    groups: int  # the heads of a group share the projections into and out of their states
    state_dim: int  # a head's state has state_dim x head_dim elements
    kernel: int  # number of tokens in the kernel of the convolution

    @property
    def inner(self) -> int:
        """Return the number of elements of the inputs of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """Return the numbers of elements that the convolution reads: inputs, and projections into and out of states."""
        return self.inner, self.groups * self.state_dim, self.groups * self.state_dim

    @property
    def projection_sizes(self) -> tuple[int, ...]:
        """Return the numbers of elements of a token's projection: gates, convolved elements, and time steps."""
        return self.inner, *self.conv_sizes, self.heads


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """Sliding-window attention in some layers."""

    tokens: int  # number of tokens that a token attends to, including itself
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """MoE layers, which replace the MLP in all layers except ``dense_layers``."""

    count: int  # experts per layer
    ffn_size: int
    per_token: int
    shared_ffn_size: int = 0  # FFN size of the shared expert, which processes every token; 0: there is none
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """A tower that reads images. It turns patches into features, which replace token embeddings."""

    image_token_id: int  # id of the replaced tokens
    hidden_size: int
    ffn_size: int
    depth: int
    patch_size: int  # pixels per edge
    temporal_patch_size: int
    channels: int
    merge_size: int  # merge_size x merge_size patches become one token
    # Channel pairs of a head that rotate by time, row and column. Empty: image tokens rotate like other tokens.
    sections: tuple[int, ...]
    positions: int = 0  # number of learned position embeddings
    deepstack: int = 0  # number of decoder layers that add features of earlier tower layers to their output

    def tokens(self, grid: Sequence[int]) -> int:
        """Return the number of tokens of an image with ``grid`` (time, rows, columns) patches."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) for linear layers."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # layers with an adapter; see ``rlhf_mcore.families.adapters``
    use_rslora: bool = False  # scale by the root of the rank (Kalajdzievski 2023, arXiv 2312.03732)
    # Number of rows at the end of each A that are not trained, with the matching columns of B
    fixed: int = 0
    use_dora: bool = False  # adds a magnitude for each output to A and B (Liu et al. 2024, arXiv 2402.09353)

    @property
    def scale(self) -> float:
        """Return the factor of the product B A."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes of a decoder, read from a Hugging Face config.

    All fields except ``max_positions`` and ``window`` determine the storage of each weight. Parts that a model does not have are
    None.
    """

    family: str  # name of a module of rlhf_mcore/families
    num_layers: int
    hidden_size: int
    attention: GroupedSizes | LatentSizes  # in all layers without a gated delta net or wide heads
    ffn_size: int
    vocab_size: int  # true size, without padding
    tied_embeddings: bool
    head: str = "lm"  # lm: logits | token: a scalar per token, with a bias | sequence: a scalar per token, no bias
    max_positions: int = 0  # tokens of the longest sequence; 0: unknown
    window: WindowSizes | None = None
    wide: WideSizes | None = None
    delta: DeltaSizes | None = None
    space: SpaceSizes | None = None
    # For models with one block per layer, the block of each layer. Other models have a mixer and an MLP in every layer.
    blocks: tuple[Block, ...] = ()
    experts: ExpertSizes | None = None
    # MTP layers that are trained with the model; they are numbered after the last layer
    mtp_layers: int = 0
    vision: VisionSizes | None = None
    adapter: AdapterSizes | None = None  # if set, names and shapes are only the adapters'

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Return the number of elements of a query and of a key."""
        return self.attention.head_dim

    @property
    def value_dim(self) -> int:
        return self.attention.value_dim

    @property
    def num_experts(self) -> int:
        """Return the number of experts of an MoE layer; 0 if the model has none."""
        return 0 if self.experts is None else self.experts.count

    @property
    def attentions(self) -> list[tuple[GroupedSizes | LatentSizes, tuple[int, ...]]]:
        """Return each kind of attention with its layers, without MTP layers."""
        wide = () if self.wide is None else self.wide.layers
        others = tuple(n for n in range(self.num_layers) if self.layer_kind(n)[0] in ("attention", "indexed", "shared"))
        return [(self.attention, others), *([(self.wide.heads, wide)] if self.wide is not None else [])]

    def attention_of(self, layer: int) -> GroupedSizes | LatentSizes:
        """Return the sizes of a layer's attention."""
        return self.wide.heads if self.wide is not None and layer in self.wide.layers else self.attention

    @property
    def delta_layers(self) -> tuple[int, ...]:
        return () if self.delta is None else self.delta.layers

    @property
    def recurrent_part(self) -> str | None:
        """Name the layers whose state passes from token to token, or return None without such layers."""
        return "gated delta nets" if self.delta is not None else "state spaces" if self.space is not None else None

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in all layers: mixers, MLPs and MoE blocks."""
        return len(self.blocks) or 2 * self.num_layers

    @property
    def has_dense_mlp(self) -> bool:
        return any(self.layer_kind(layer)[1] == "dense" for layer in range(self.num_layers))

    def is_moe_layer(self, layer: int) -> bool:
        return self.layer_kind(layer)[1] == "moe"

    @property
    def moe_layers(self) -> list[int]:
        """Return the layers with experts, without MTP layers."""
        return [layer for layer in range(self.num_layers) if self.is_moe_layer(layer)]

    @property
    def trunk(self) -> ModelGeometry:
        """Return the geometry of the model without MTP layers, which samples one token per pass."""
        return replace(self, mtp_layers=0)

    @property
    def mtp_numbers(self) -> range:
        """Return the layer numbers of the trained MTP layers."""
        return range(self.num_layers, self.num_layers + self.mtp_layers)

    @property
    def num_attention_layers(self) -> int:
        return sum(len(layers) for _, layers in self.attentions)

    def count_layers(self, mixer: Mixer) -> int:
        """Return the number of layers with this mixer, without MTP layers."""
        return sum(self.layer_kind(layer)[0] == mixer for layer in range(self.num_layers))

    def layer_kind(self, layer: int) -> LayerKind:
        """Return the kinds of a layer's two blocks. Layers of the same kind have the same parameters."""
        if self.blocks:
            block = self.blocks[layer]
            return ("none", block) if block == "dense" or block == "moe" else (block, "none")
        mixer: Mixer = "delta" if layer in self.delta_layers else "attention"
        if isinstance(self.attention, LatentSizes) and (indexer := self.attention.indexer) is not None:
            mixer = "shared" if layer in indexer.shared_layers else "indexed"
        if self.wide is not None and layer in self.wide.layers:
            mixer = "wide"
        is_dense = self.experts is None or layer in self.experts.dense_layers
        return mixer, "dense" if is_dense else "moe"

    def padded_vocab(self, tp: int) -> int:
        """Return the padded number of rows of the embedding on tensor-parallel ranks: the next multiple of ``tp``."""
        return -(-self.vocab_size // tp) * tp


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that a rank stores. For experts' tensors, it includes the stored range of experts.

    The tensor is split into ``size`` parts by tensor parallelism, or by expert tensor parallelism for experts. This rank stores part
    ``rank``. Each expert-parallel rank stores an equal contiguous range of experts: range ``expert_rank`` of
    ``expert_size``.
    """

    rank: int
    size: int
    expert_rank: int = 0
    expert_size: int = 1


@dataclass(slots=True)
class LocalParameter:
    """This rank's shard of a trained tensor. ``name`` is Megatron's, with the layer's number in the whole model."""

    name: str
    tensor: Tensor
    shard: Shard


@dataclass(slots=True)
class StateShard:
    """The optimizer state of this rank for elements ``start`` to ``stop`` of a local parameter, in flat order.

    ``tensors`` are live views [stop - start] by kind: ``exp_avg`` and ``exp_avg_sq``, or ``momentum``. ``master`` is included if the
    weights have 16 bits. Files store all kinds in fp32.
    """

    name: str
    shard: Shard
    start: int
    stop: int
    tensors: dict[str, Tensor | SplitMaster]
