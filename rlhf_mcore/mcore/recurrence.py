"""Parts that recurrent layers share: heads over ranks, sequences in chunks, and causal convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlhf_mcore.data.prefixes import PrefixTree
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.parallel.context import order_of_one, to_parts, to_tokens

CHUNK = 64  # tokens per chunk; states pass from chunk to chunk, not from token to token


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that a rank computes, as indices among the heads of a tensor-parallel rank.

    ``uses``: the number of value heads that use each key head.
    """

    keys: range
    values: range
    uses: tuple[int, ...]

    def repeat_keys(self, x: Tensor) -> Tensor:
        """Map [N, key heads, K] to [N, value heads, K]."""
        if len(set(self.uses)) == 1:
            return x.repeat_interleave(self.uses[0], dim=1)
        heads = x.unbind(1)  # avoids asking the device for the resulting number of heads
        return torch.stack([head for head, uses in zip(heads, self.uses, strict=True) for _ in range(uses)], dim=1)


def share_heads(num_keys: int, num_values: int, ranks: int) -> list[Heads]:
    """Distribute value heads over ranks as evenly as possible.

    A rank may get none. Several ranks may share a key head.
    """
    repeats, shares = num_values // num_keys, []
    for first, last in itertools.pairwise(num_values * rank // ranks for rank in range(ranks + 1)):
        keys = range(first // repeats, max(-(-last // repeats), first // repeats + 1))
        uses = (min(last, (key + 1) * repeats) - max(first, key * repeats) for key in keys)
        shares.append(Heads(keys, range(first, last), tuple(uses)))
    return shares


class NamedWeight(torch.nn.Module):
    """A module that holds one weight, so that the weight's name contains the module's."""

    def __init__(self, config: TransformerConfig, *shape: int | None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))  # type: ignore[arg-type]


def causal_convolution(x: Tensor, weight: Tensor, lengths: NDArray[np.int64]) -> Tensor:
    """Convolve each channel with its own kernel over the last tokens, for sequences back to back.

    Args:
        x: [N, C] tokens.
        weight: [C, K] kernels, whose last element is multiplied with the token itself.
        lengths: lengths of the sequences. A token sees no other sequence.

    Returns:
        [N, C].
    """
    places = torch.from_numpy(number_tokens(lengths)).to(x.device)[:, None]
    kernel = weight.size(1)
    wide, factors = x.float(), weight.float()
    out = wide * factors[:, -1]
    for back in range(1, kernel):
        earlier = F.pad(wide, (0, 0, back, 0))[: len(x)].where(places >= back, wide.new_zeros(()))
        out = out + earlier * factors[:, kernel - 1 - back]
    return out.to(x.dtype)


def convolve_paths(x: Tensor, weight: Tensor, tree: PrefixTree) -> Tensor:
    """Compute ``causal_convolution`` over a tree.

    The first tokens of a segment see the last tokens of its ancestors.
    """
    kernel, wide, factors = weight.size(1), x.float(), weight.float()
    out, padded = wide * factors[:, -1], F.pad(wide, (0, 0, 0, 1))
    for back in range(1, kernel):
        earlier = torch.from_numpy(tree.earlier(back)).to(x.device)  # len(x) means no token
        out = out + padded.index_select(0, earlier) * factors[:, kernel - 1 - back]
    return out.to(x.dtype)


def run_by_depth(
    recurrence: Callable[..., tuple[Tensor, list[Tensor]]], inputs: Sequence[Tensor], out: Tensor, tree: PrefixTree
) -> Tensor:
    """Run a recurrence over a tree.

    All segments of one depth run together, from the final states of their parents.

    Args:
        recurrence: maps inputs [n, ...] of sequences back to back, their lengths, and their initial states or None to
            outputs [n, ...] and final states. Concatenated, these are in the order of ``rank_by_chunks``.
        inputs: [N, ...] of all segments.
        out: [N, ...] zeros.
        tree: the segments.
    """
    depths = np.array(tree.depths())
    begins, sizes, parents = (
        np.array([getattr(segment, name) for segment in tree.segments]) for name in ("begin", "size", "parent")
    )
    ranks, ends = np.zeros_like(depths), list[Tensor]()  # index of each segment's state among the states of its depth
    for depth in range(depths.max() + 1):
        (numbers,) = np.nonzero(depths == depth)
        own, initial = sizes[numbers], None
        if depth:
            initial = torch.cat(ends).index_select(0, torch.from_numpy(ranks[parents[numbers]]).to(out.device))
        places = torch.from_numpy(np.repeat(begins[numbers], own) + number_tokens(own)).to(out.device)
        found, ends = recurrence(*(x.index_select(0, places) for x in inputs), own, initial)
        out, ranks[numbers] = out.index_copy(0, places, found), rank_by_chunks(own)
    return out


def rank_by_chunks(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rank sequences by their number of chunks, longest first."""
    ranks = np.empty_like(lengths)
    ranks[np.argsort(lengths // -CHUNK, kind="stable")] = np.arange(len(lengths))
    return ranks


class HeadMixer(torch.nn.Module):
    """Mix tokens by heads with states that pass from token to token.

    Under context parallelism each rank computes some heads of its tensor-parallel rank for all tokens, because a state
    depends on all of them. A subclass sets ``_cp`` (the group), ``_shares`` and ``_mine`` (the heads of all ranks and
    of this rank).
    """

    _cp: Any
    _shares: list[Heads]
    _mine: Heads

    def kinds_of(self, heads: Heads) -> tuple[tuple[int, range, int], ...]:
        """Return for each kind of input: its number of heads here, those among ``heads``, and the columns of a head."""
        raise NotImplementedError

    def kernels_for(self, batch: int, packed: PackedSequences | None) -> Any:
        """Return the kernels of this input, or None without them."""
        raise NotImplementedError

    def mix_heads(self, rows: Tensor, lengths: NDArray[np.int64], kernels: Any, tree: PrefixTree | None) -> Tensor:
        """Map [N, inputs of this rank's heads] to [N, its heads * width]."""
        raise NotImplementedError

    def mix(self, inputs: Tensor, width: int, packed: PackedSequences | None) -> Tensor:
        """Map [s, b, inputs of all heads] to [s, b, heads * ``width``]. Packed input has b = 1."""
        batch, cp = inputs.size(1), self._cp.size()
        sizes = [len(inputs) * cp] if packed is None else list(packed.sizes)
        if cp > 1:
            packed_order = None if packed is None else packed.order
            order = order_of_one(sum(sizes), cp, inputs.device) if packed_order is None else packed_order
            columns = [self.columns_of(heads, inputs.device) for heads in self._shares]
            by_rank = inputs.index_select(-1, torch.cat(columns))
            inputs = to_parts(by_rank, [len(each) for each in columns], order, self._cp)
        lengths = np.array(sizes * batch)  # packed input has one row
        kernels = self.kernels_for(batch, packed) if self._mine.values else None
        tree = None if packed is None or packed.tree is None else packed.tree.tree
        # The recurrence would save many times the size of its input, so the backward pass recomputes it.
        rows = inputs.transpose(0, 1).flatten(0, 1)
        out = checkpoint(self.mix_heads, rows, lengths, kernels, tree, use_reentrant=False, preserve_rng_state=False)
        out = out.unflatten(0, (batch, -1)).transpose(0, 1)
        if cp > 1:
            out = to_tokens(out, [len(heads.values) * width for heads in self._shares], order, self._cp)
        mixed: Tensor = out
        return mixed

    def columns_of(self, heads: Heads, device: torch.device) -> Tensor:
        """Return the columns of the inputs on this tensor-parallel rank that belong to ``heads``, kind by kind."""
        parts, begin = [], 0
        for count, some, width in self.kinds_of(heads):
            parts.append(torch.arange(begin + some.start * width, begin + some.stop * width, device=device))
            begin += count * width
        return torch.cat(parts)


def chunk_places(lengths: NDArray[np.int64]) -> tuple[Tensor, list[int]]:
    """Compute the position of each token after cutting sequences into chunks.

    All first chunks come first, then all second chunks, and so on. Longer sequences precede shorter ones. Within each
    group, the sequences that continue are therefore at the front.

    Returns:
        The position of each token [N], and the number of sequences that have a first, a second, ... chunk.
    """
    chunks = -(-lengths // CHUNK)
    sizes = [int((chunks > nth).sum()) for nth in range(chunks.max())]
    starts, token = np.cumsum([0, *sizes]), number_tokens(lengths)
    row = starts[token // CHUNK] + np.repeat(rank_by_chunks(lengths), lengths)
    return torch.from_numpy(row * CHUNK + token % CHUNK), sizes


def number_tokens(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each token [N] in its sequence."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
