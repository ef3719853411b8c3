"""The sizes of a model, and which part of its tensors a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.families.vision import VisionSizes


@dataclass(frozen=True, slots=True)
class GroupedSizes:
    """Attention in which groups of query heads share a head of keys and values (Ainslie et al. 2023, arXiv 2305.13245)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool = False  # where config.json decides it; some families always have norms of query and key heads
    has_qkv_bias: bool = False  # the same of biases of queries, keys and values

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        return self.head_dim


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): keys and values are projected by way of a latent."""

    num_heads: int
    head_dim: int  # of queries and keys
    rope_dim: int  # the part of ``head_dim`` with a rotation
    value_dim: int
    kv_rank: int
    q_rank: int = 0  # of the latent of queries; 0: they are projected at once

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Gated delta nets (Yang et al. 2024, arXiv 2412.06464) in the place of attention in some layers."""

    layers: tuple[int, ...]
    key_heads: int  # of queries too
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # tokens that a convolution is over

    @property
    def keys(self) -> int:
        """Elements of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of the values of all heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class WindowSizes:
    """Attention of some layers to the last tokens alone."""

    tokens: int  # that a token attends to, itself among them
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A mixture of experts in the place of the MLP, in all layers but ``dense_layers``."""

    count: int  # of a layer
    ffn_size: int
    per_token: int
    shared_ffn_size: int = 0  # of the expert that sees every token; 0: there is none
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) of linear layers."""

    rank: int
    alpha: float
    targets: tuple[str, ...]  # layers that have one; see ``rlhf_mcore.families.adapters``
    use_rslora: bool = False  # scale by the root of the rank (Kalajdzievski 2023, arXiv 2312.03732)
    # So many of the rows of an A, the last ones, do not learn, nor do the columns of B that go with them
    fixed: int = 0
    vision: VisionSizes | None = None
    use_dora: bool = False  # beside A and B a magnitude for each output (Liu et al. 2024, arXiv 2402.09353)

    @property
    def scale(self) -> float:
        """Return the factor of the product B A."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes of a decoder, read from a Hugging Face config.

    Without ``max_positions`` and ``window`` they decide where every weight is stored. Parts that a model does not have are None.
    """

    family: str  # name of a module of rlhf_mcore/families
    num_layers: int
    hidden_size: int
    attention: GroupedSizes | LatentSizes  # of all layers that have no gated delta net
    ffn_size: int
    vocab_size: int  # true size, without padding
    tied_embeddings: bool
    head: str = "lm"  # lm: logits | token: a scalar per token, with a bias | sequence: a scalar per token, no bias
    max_positions: int = 0  # tokens of the longest sequence; 0: unknown
    window: WindowSizes | None = None
    delta: DeltaSizes | None = None
    experts: ExpertSizes | None = None
    # Behind the last layer, where they are trained with the model; numbered as if they were further ones
    mtp_layers: int = 0
    vision: VisionSizes | None = None
    adapter: AdapterSizes | None = None  # of a geometry of adapters alone, which are what has names and shapes

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a query and of a key."""
        return self.attention.head_dim

    @property
    def value_dim(self) -> int:
        return self.attention.value_dim

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has a mixture; 0: no layer has one."""
        return 0 if self.experts is None else self.experts.count

    @property
    def delta_layers(self) -> tuple[int, ...]:
        return () if self.delta is None else self.delta.layers

    @property
    def has_dense_mlp(self) -> bool:
        return self.experts is None or bool(self.experts.dense_layers)

    def is_moe_layer(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def moe_layers(self) -> list[int]:
        """The layers with experts, MTP layers not among them."""
        return [layer for layer in range(self.num_layers) if self.is_moe_layer(layer)]

    @property
    def trunk(self) -> ModelGeometry:
        """The model that samples a token at a time."""
        return replace(self, mtp_layers=0)

    @property
    def mtp_numbers(self) -> range:
        """Numbers of the MTP layers that are trained."""
        return range(self.num_layers, self.num_layers + self.mtp_layers)

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - len(self.delta_layers)

    def layer_kind(self, layer: int) -> tuple[bool, bool]:
        """Layers of one kind have the same parameters: whether there are experts, and a gated delta net."""
        return self.is_moe_layer(layer), layer in self.delta_layers

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding as tensor-parallel ranks hold it: the next multiple of ``tp``."""
        return -(-self.vocab_size // tp) * tp


@dataclass(frozen=True, slots=True)
class Shard:
    """Name the part of a tensor that a rank holds, and of an expert's tensor the experts.

    ``rank`` of ``size`` is the split of the tensor itself: tensor parallel, for experts expert tensor parallel. Experts are given to
    expert-parallel ranks in equal contiguous runs; ``expert_rank`` of ``expert_size`` is the run of this rank.
    """

    rank: int
    size: int
    expert_rank: int = 0
    expert_size: int = 1


@dataclass(slots=True)
class LocalParameter:
    """A trained tensor as this rank holds it. ``name`` is Megatron's, with the layer's number counted over the whole model."""

    name: str
    tensor: Tensor
    shard: Shard


@dataclass(slots=True)
class StateShard:
    """Hold what the optimizer of this rank keeps for elements ``start`` to ``stop`` of a local parameter, counted in flat order.

    ``tensors`` are live views [stop - start] by kind: ``exp_avg`` and ``exp_avg_sq``, or ``momentum``, and ``master`` where the
    weights that the optimizer steps are not the parameter itself.
    """

    name: str
    shard: Shard
    start: int
    stop: int
    tensors: dict[str, Tensor]
