"""Attention over a prefix tree: each segment sees its ancestors and itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.data.prefixes import PrefixTree
from rlhf_mcore.parallel.context import chunks_of

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TreePart:
    """The part of a tree that a context-parallel rank computes.

    A piece is a segment, or one of the rank's two chunks of a segment. Queries are positions among the rank's
    computed tokens, keys are positions among the tokens of all ranks. Each rank computes the same number of tokens
    per segment.

    Attributes:
        pieces: for each piece, its queries and the spans of keys that it sees. Its own keys are last.
        spans: (queries, keys, whether to mask causally), which together cover the pieces. The queries of all
            descendants of a segment are one span.
        placed: the tensors of ``borders`` on the device, if one kernel computes all pieces.
    """

    tree: PrefixTree
    pieces: list[tuple[Span, list[Span]]]
    spans: list[tuple[Span, Span, bool]]
    placed: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: PrefixTree, rank: int, cp: int) -> TreePart:
        """Build the part of ``rank`` of a tree that is split over ``cp`` ranks."""
        pieces: list[tuple[Span, list[Span]]] = []
        own: list[tuple[Span, Span, bool]] = []
        above: list[tuple[Span, Span, bool]] = []
        for number, segment in enumerate(tree.segments):
            ancestors = [tree.segments[k] for k in tree.path(number)]
            path = [(ancestor.begin, ancestor.begin + ancestor.size) for ancestor in ancestors]
            first, behind = segment.begin, segment.begin + segment.size
            chunk = segment.size // (2 * cp)
            place = first // cp
            chunks = (
                [(first, behind)]
                if cp == 1
                else [(first + k * chunk, first + (k + 1) * chunk) for k in chunks_of(rank, cp)]
            )
            for begin, end in chunks:
                queries = (place, place := place + end - begin)
                pieces.append((queries, _join_adjacent([*path, (first, end)])))
                own.append((queries, (begin, end), True))
                if begin > first:
                    own.append((queries, (first, begin), False))
            if segment.end > behind:
                above.append(((behind // cp, segment.end // cp), (first, behind), False))
        return cls(tree, pieces, own + above)

    def borders(self) -> dict[str, Tensor]:
        """Describe the pieces for a kernel over packed sequences, which aligns the last query with the last key.

        ``piece_borders`` and ``path_borders`` [pieces + 1] int32 are the borders of the pieces' queries and keys.
        ``path_places`` [keys of all pieces] int64 are the positions of the keys.
        """
        queries = [end - begin for (begin, end), _ in self.pieces]
        keys = [sum(end - begin for begin, end in spans) for _, spans in self.pieces]
        places = [torch.arange(begin, end) for _, spans in self.pieces for begin, end in spans]
        first, second = (torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (queries, keys))
        return {"piece_borders": first, "path_borders": second, "path_places": torch.cat(places)}

    @property
    def longest_piece(self) -> int:
        """The maximum number of queries in a piece."""
        return max(end - begin for (begin, end), _ in self.pieces)


def _join_adjacent(spans: list[Span]) -> list[Span]:
    """Join adjacent spans, such as a segment and its first child."""
    joined = spans[:1]
    for begin, end in spans[1:]:
        if joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SpanAttention(torch.autograd.Function):
    """Attend span by span on a CPU. No key is copied, and all descendants of a segment read its keys together.

    The softmaxes of spans are combined by their log-sum-exps (Milakov and Gimelshein 2018, arXiv 1805.02867). The
    backward pass of each span uses the combined output and log-sum-exp, so its gradients are exact terms of the sum.

    q [n, heads, d], k and v [M, key heads, d] -> [n, heads, d].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, part: TreePart, scale: float | None) -> Tensor:
        """Attend and save the log-sum-exps."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out, sums = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        for (a, b), (c, d), causal in part.spans:
            here, own = _forward(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], 0.0, causal, scale=scale)
            joined = torch.logaddexp(sums[:, :, a:b], own)
            before, now = ((x - joined).exp().unsqueeze(-1) for x in (sums[:, :, a:b], own))
            out[:, :, a:b] = out[:, :, a:b] * before + here * now
            sums[:, :, a:b] = joined
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.part, ctx.scale = part, scale
        return out.squeeze(0).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Add up the gradients of the spans, in order."""
        q, k, v, out, sums = ctx.saved_tensors
        grad = grads[0].transpose(0, 1).unsqueeze(0)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for (a, b), (c, d), causal in ctx.part.spans:
            queries, keys = (slice(None), slice(None), slice(a, b)), (slice(None), slice(None), slice(c, d))
            inputs = grad[queries], q[queries], k[keys], v[keys], out[queries], sums[queries]
            parts = _backward(*inputs, 0.0, causal, scale=ctx.scale)
            dq[queries] += parts[0]
            dk[keys] += parts[1]
            dv[keys] += parts[2]
        return *(x.squeeze(0).transpose(0, 1) for x in (dq, dk, dv)), None, None


def attend_by_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: TreePart,
    window: int | None,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attend piece by piece, each with a copy of the keys that it sees.

    Args:
        q: [n, heads, d] of this rank.
        k, v: [M, key heads, d] of all ranks.
        window: number of tokens that a query sees, including itself; None: all.
        attend: attention for one piece [1, heads, tokens, d], whose queries are the last tokens of the keys.

    Returns:
        [n, heads, d of the values].
    """
    # Split all pieces in one call, because the gradient of a separate slice has the size of the whole tensor.
    borders = sorted({place for _, spans in part.pieces for span in spans for place in span} | {0, len(k)})
    number = {place: which for which, place in enumerate(borders)}
    sizes = [end - begin for begin, end in pairwise(borders)]
    keys, values, parts = k.split(sizes), v.split(sizes), []
    for own, (_, spans) in zip(q.split([end - begin for (begin, end), _ in part.pieces]), part.pieces, strict=True):
        seen = [which for begin, end in spans for which in range(number[begin], number[end])]
        if window is not None:  # skip the path before the window
            needed, first = window + len(own) - 1, len(seen)
            while first and needed > 0:
                first -= 1
                needed -= sizes[seen[first]]
            seen = seen[first:]
        own_keys, own_values = (torch.cat([x[which] for which in seen]) for x in (keys, values))
        one = [x.transpose(0, 1).unsqueeze(0) for x in (own, own_keys, own_values)]
        parts.append(attend(*one).squeeze(0).transpose(0, 1))
    return torch.cat(parts)
