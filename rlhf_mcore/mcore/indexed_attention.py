"""Sparse attention of DeepSeek-V3.2 (DeepSeek-AI 2025): each token attends to the keys that an indexer selects.

The indexer gives a score to every earlier token: a weighted sum over its heads of ReLU(q k). A token attends to the
``top_k`` tokens with the largest scores. The indexer is frozen, or it learns from a separate loss
(``indexer_loss.py``). It computes in the dtype of the model and its scores in fp32, as in transformers. The authors'
code computes in fp8. It also rotates queries and keys by a Hadamard matrix, which does not change their products.

In GLM-5.2, some layers have no indexer. They use the keys that the last layer with an indexer selected (arXiv
2603.12201).

The attention is torch's, with a mask. Sequences of at most ``top_k`` tokens use the causal mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from rlhf_mcore.families.base import Family
from rlhf_mcore.families.indexed import IndexedLatent
from rlhf_mcore.geometry import IndexerSizes
from rlhf_mcore.mcore.attention import LATENT_NORM_EPS, LatentAttention
from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.mcore.indexer_loss import indexer_loss
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.parallel.context import chunks_of, gather_context, order_of_one

_SCORES = 1 << 25  # scores of heads that exist at once: 128 MiB
_KEY_NORM_EPS = 1e-6
Projected = tuple[Tensor, Tensor, Tensor]  # result of ``Indexer.project``


class Indexer(torch.nn.Module):
    """Score the tokens of a sequence for each of its tokens. Without ``learn``, no optimizer updates the weights."""

    queries: Tensor  # [heads * head_dim, q_rank]
    keys: Tensor  # [head_dim, hidden]
    norm_weight: Tensor  # [head_dim]
    norm_bias: Tensor  # [head_dim]
    head_weights: Tensor  # [heads, hidden]

    def __init__(self, sizes: IndexerSizes, config: TransformerConfig, *, rotates_pairs: bool):
        super().__init__()
        self.sizes, self._rope, self._rotates_pairs = sizes, config.qk_pos_emb_head_dim, rotates_pairs
        shapes = {
            "queries": (sizes.num_heads * sizes.head_dim, config.q_lora_rank),
            "keys": (sizes.head_dim, config.hidden_size),
            "norm_weight": (sizes.head_dim,),
            "norm_bias": (sizes.head_dim,),
            "head_weights": (sizes.num_heads, config.hidden_size),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=config.params_dtype))

    def learn(self, *, alone: bool) -> None:
        """Turn the weights into parameters. ``alone``: their gradient is clipped by its own norm."""
        for name in list(self._buffers):
            tensor = self._buffers.pop(name)
            assert tensor is not None
            weight = torch.nn.Parameter(tensor)
            weight.is_clipped_alone = alone  # type: ignore[attr-defined]
            self.register_parameter(name, weight)

    def project(self, hidden: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        """Return queries [s, heads, head_dim], keys [s, head_dim] and weights [s, heads] of one sequence, fp32.

        Args:
            hidden: [s, hidden], inputs of the attention.
            latent: [s, q_rank], normed latents of the queries.
            cos, sin: [s, rope_dim].
        """
        heads = self.sizes.num_heads
        q = self._rotate(F.linear(latent, self.queries).unflatten(-1, (heads, -1)), cos[:, None], sin[:, None]).float()
        k = F.linear(hidden, self.keys)
        k = F.layer_norm(k, k.shape[-1:], self.norm_weight, self.norm_bias, _KEY_NORM_EPS)
        k = self._rotate(k, cos, sin).float()
        return q, k, F.linear(hidden.float(), self.head_weights.float()) * heads**-0.5

    def score(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Return the scores [r, s] that r tokens give to all tokens."""
        scores = F.relu(torch.einsum("shd,td->sht", q, k) * self.sizes.head_dim**-0.5)
        return torch.einsum("sh,sht->st", weights, scores)

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Return the places [s, top_k] of the selected keys of one sequence with more than ``top_k`` tokens.

        A token with fewer than ``top_k`` tokens before it also gets places after it, which a causal mask hides.
        """
        places, step = [], max(_SCORES // (self.sizes.num_heads * len(q)), 1)
        for first in range(0, len(q), step):
            rows = slice(first, first + step)
            scores = self.score(q[rows], k, weights[rows])
            later = torch.ones_like(scores, dtype=torch.bool).triu(first + 1)
            places.append(scores.masked_fill_(later, -torch.inf).topk(self.sizes.top_k).indices)
        return torch.cat(places)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first elements of each head. Neighbours or halves of them form the pairs.

        Neighbours are moved to halves. Products of queries and keys do not depend on the order.
        """
        turned, rest = x.split([self._rope, x.size(-1) - self._rope], dim=-1)
        if self._rotates_pairs:
            turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        low, high = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-high, low], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1)


class IndexedAttention(LatentAttention):
    """Latent attention to the keys that an indexer selects.

    The selection travels to the core attention as the attention mask [b, s, top_k], for packed sequences [1, N, top_k].
    It is None if all sequences are short. Under context parallelism each rank selects for all tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        *args: Any,
        rotates_pairs: bool,
        **kwargs: Any,
    ):
        super().__init__(config, submodules, *args, **kwargs)
        sizes = IndexerSizes(config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.dsa_indexer_topk)
        self.indexer = Indexer(sizes, config, rotates_pairs=rotates_pairs)
        self.stage = "frozen"  # see ``learn``
        self.loss_weight, self.loss_sum = 0.0, torch.zeros(())  # factor of a token's loss, and their sum in an update
        self._attended: list[Tensor] = []  # queries and keys of the pass

    def learn(self, stage: str) -> None:
        """Train the indexer. ``stage``: "warm_up" attends to all earlier tokens, "sparse" to selected tokens."""
        self.stage = stage
        self.indexer.learn(alone=stage == "sparse")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple:
        assert attention_mask is None, "families with an indexer have no images"
        learns = self.stage != "frozen" and self.training and torch.is_grad_enabled()
        sequences = self._sequences(hidden_states.detach(), packed_seq_params, learns=learns)
        with torch.set_grad_enabled(learns):
            projected = [self._project(x) if learns or self._is_long(x) else None for x in sequences]
        selected = self._select(sequences, projected, is_packed=packed_seq_params is not None)
        if not learns:
            projected = []  # free them before the attention
        _selections(packed_seq_params)[0] = selected
        result: tuple = super().forward(hidden_states, selected, *args, packed_seq_params=packed_seq_params, **kwargs)
        if learns:
            loss = self._loss(projected, selected, packed_seq_params)
            result = (MoEAuxLossAutoScaler.apply(result[0], self.loss_weight * loss), *result[1:])
        return result

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_query_key_value_tensors(*args, **kwargs)
        if self.stage != "frozen":
            self._attended = [x.detach() for x in found[:2]]
        return found

    @torch.no_grad()
    def _sequences(self, hidden: Tensor, packed: PackedSequences | None, *, learns: bool) -> list[Tensor]:
        """Return all tokens [s, hidden] of each sequence, or [] if nothing is selected and learned."""
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        if self.config.sequence_parallel and tp.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, group=tp)
        sizes = [len(hidden) * cp.size()] * hidden.size(1) if packed is None else list(packed.sizes)
        if not learns and (self.stage == "warm_up" or max(sizes) <= self.indexer.sizes.top_k):
            return []
        if cp.size() > 1:
            order = packed.order if packed is not None else None
            if order is None:
                order = order_of_one(sizes[0], cp.size(), hidden.device)
            hidden = gather_context(hidden, order, cp, sums_gradient=False)
        return list(hidden.unbind(1) if packed is None else hidden.squeeze(1).split(sizes))

    @torch.no_grad()
    def _select(
        self, sequences: list[Tensor], projected: Sequence[Projected | None], *, is_packed: bool
    ) -> Tensor | None:
        """Return the places of the selected keys for all tokens. All places are 0 in short sequences."""
        if self.stage == "warm_up" or not any(map(self._is_long, sequences)):
            return None
        places = [
            self.indexer.select(*inputs)
            if inputs is not None and self._is_long(sequence)
            else sequence.new_zeros(len(sequence), self.indexer.sizes.top_k, dtype=torch.int64)
            for sequence, inputs in zip(sequences, projected, strict=True)
        ]
        return torch.cat(places).unsqueeze(0) if is_packed else torch.stack(places)

    def _is_long(self, sequence: Tensor) -> bool:
        return len(sequence) > self.indexer.sizes.top_k

    def _project(self, hidden: Tensor) -> Projected:
        """Return the indexer's queries, keys and weights for one sequence [s, hidden]."""
        with torch.no_grad():
            down: Any = self.linear_q_down_proj
            latent = F.linear(hidden, down.weight)
            norm = getattr(self.linear_q_up_proj, "layer_norm_weight", None)  # a fused layer contains the norm
            norm = self.q_layernorm.weight if norm is None else norm
            latent = F.rms_norm(latent, latent.shape[-1:], norm, LATENT_NORM_EPS)
            rotary: Any = self.rotary_pos_emb
            angles = torch.arange(len(hidden), device=hidden.device)[:, None] * rotary.inv_freq.to(hidden.device)
            angles = torch.cat([angles, angles], dim=-1)
            scale = rotary.scale or 1.0
            cos, sin = ((part * scale).to(hidden.dtype) for part in (angles.cos(), angles.sin()))
        return self.indexer.project(hidden, latent, cos, sin)

    def _loss(
        self, projected: Sequence[Projected | None], selected: Tensor | None, packed: PackedSequences | None
    ) -> Tensor:
        """Return the summed loss of this rank's tokens, without padding. Count it once, also if the layer is recomputed."""
        assert packed is not None, "training of indexers needs packed sequences"
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        queries, keys = (x.flatten(0, 1) if x.dim() == 4 else x for x in self._attended)
        self._attended = []
        if cp.size() > 1:
            assert packed.order is not None
            keys = gather_context(keys, packed.order, cp, sums_gradient=False)
        places = None if selected is None else selected[0].split(list(packed.sizes))
        own = queries.split([size // cp.size() for size in packed.sizes])
        losses = []
        for number, (length, q, k) in enumerate(zip(packed.lengths, own, keys.split(list(packed.sizes)), strict=True)):
            rows = torch.arange(len(k), device=k.device)
            if cp.size() > 1:
                chunks = rows.chunk(2 * cp.size())
                rows = torch.cat([chunks[chunk] for chunk in chunks_of(cp.rank(), cp.size())])
            real = rows < length
            rows = rows[real]
            chosen = places[number][rows] if places is not None and self._is_long(k) else None
            inputs = projected[number]
            assert inputs is not None
            index_q, index_k, weights = inputs
            of_rows = index_q[rows], index_k, weights[rows]
            attended = q[real], k, self.softmax_scale
            losses.append(indexer_loss(self.indexer.score, of_rows, attended, rows, chosen, tp))
        loss = torch.stack(losses).sum()
        self.loss_sum = self.loss_sum.to(loss.device) + loss.detach()
        return loss


def indexers(chunks: Iterable[torch.nn.Module]) -> Iterator[IndexedAttention]:
    """Yield the attention layers of a model that have an indexer."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, IndexedAttention):
                yield module


class SharedAttention(LatentAttention):
    """Latent attention to the keys that the last layer with an indexer selected.

    The backward pass can recompute a layer after other layers have selected. A packed microbatch therefore stores the
    selection for each of these layers. Padded microbatches must not recompute whole layers.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple:
        selected = (kept := _selections(packed_seq_params))[0]
        if packed_seq_params is not None:
            selected = kept.setdefault(self.layer_number, selected)
        result: tuple = super().forward(hidden_states, selected, *args, packed_seq_params=packed_seq_params, **kwargs)
        return result


_of_padded: dict[int, Tensor | None] = {}  # the selection in the padded microbatch that is computed


def _selections(packed: PackedSequences | None) -> dict[int, Tensor | None]:
    return _of_padded if packed is None else packed.selections


class SelectedAttention(SDPACoreAttention):
    """Causal attention to selected keys. The argument ``attention_mask`` contains their places, for all tokens of all ranks."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, images: Tensor | None) -> Tensor:
        length, selected = k.size(2), images
        if selected is None or length <= selected.size(-1):
            return super()._attend(q, k, v, None)
        places = torch.arange(length, device=q.device)
        rows = places
        if self._group is not None:
            part = q.size(2) // 2
            numbers = chunks_of(self._group.rank(), self._group.size())
            rows = torch.cat([places[number * part : (number + 1) * part] for number in numbers])
        parts, earlier = [], places <= rows[:, None]
        for number, of_sequence in enumerate(selected):  # one mask [queries, keys] at a time
            one = slice(number, number + 1)
            mask = torch.zeros_like(earlier).scatter_(-1, of_sequence[rows], True).logical_and_(earlier)
            parts.append(self._attend_masked(q[one], k[one], v[one], mask))
        return torch.cat(parts)


def use_indexed_attention(
    layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family, te: bool
) -> None:
    """Set the attention of a layer with an indexer in the layer's spec."""
    assert isinstance(family.latent, IndexedLatent)
    attention: Any = layer.self_attention
    attention.params = {**attention.params, "rotates_pairs": family.latent.rotates_pairs}
    attention.module, attention.submodules.core_attention = IndexedAttention, SelectedAttention


def use_shared_attention(
    layer: TransformerLayerSubmodules, config: TransformerConfig, family: Family, te: bool
) -> None:
    """Set the attention of a layer that uses another layer's selection in the layer's spec."""
    attention: Any = layer.self_attention
    attention.module, attention.submodules.core_attention = SharedAttention, SelectedAttention
