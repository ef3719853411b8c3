"""Core attention with torch's scaled_dot_product_attention: packed or padded, with windows and sinks, on any device.

On CUDA the attention can sum in a fixed order. Its passes then run in torch's strict deterministic mode. Outside this
attention torch only warns, because some operations have no deterministic kernel.

If torch only warns, flash and memory-efficient attention add gradients in any order (``attention_backward.cu``). In
strict mode they use a fixed order. cuDNN's attention has no fixed order, so strict mode excludes it
(``sdp_utils.cpp``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_mcore.expected_kernels import MAX_FLASH_SIZE
from rlhf_mcore.mcore.image_features import mask_with_images
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.mcore.prefix_attention import SpanAttention, TreePart, attend_by_pieces
from rlhf_mcore.parallel.context import chunks_of, gather_context, order_of_one


class SDPACoreAttention(torch.nn.Module):
    """Causal attention with torch's scaled_dot_product_attention, for padded and packed input.

    Padded input is [s, b, heads, d], packed input is [N, heads, d].

    Padding is on the right, so the causal mask is enough to hide it from real tokens. Under context parallelism a
    rank holds a part of the tokens (``parallel/context.py``). Its queries attend to the gathered keys and values of
    all ranks. If Megatron's config defines a window for a layer, a token attends only to that many tokens before it.

    The argument ``attention_mask`` contains image numbers [b, tokens of all ranks], or -1 for text. The tokens of one
    image attend to each other.
    """

    # ``kernels.py`` sets these two:
    varlen: Callable[..., Any] | None = None  # a single kernel for all packed sequences
    in_fixed_order = False  # whether sums need a fixed order

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        self.config = config
        self._scale = softmax_scale
        self._group = pg_collection.cp if pg_collection is not None and pg_collection.cp.size() > 1 else None
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if has_window else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Return [s, b, heads * d], or [N, heads * d] for packed input. d is the head size of the values."""
        cp = 1 if self._group is None else self._group.size()
        if self._group is not None:
            order = None if packed_seq_params is None else packed_seq_params.order
            if order is None:
                order = order_of_one(len(query) * cp, cp, query.device)
            key, value = (gather_context(x, order, self._group, sums_gradient=True) for x in (key, value))
        if packed_seq_params is None:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            out = self._attend(q, k, v, attention_mask)  # [b, heads, s, d]
            return out.permute(2, 0, 1, 3).flatten(2)
        if packed_seq_params.tree is not None:
            return self._attend_tree(query, key, value, packed_seq_params.tree)
        if self.varlen is not None and attention_mask is None:
            return self._attend_packed(query, key, value, packed_seq_params)
        # Neighbours of equal length form a batch. Split all of them in one call, because the gradient of a separate
        # slice has the size of the whole tensor.
        lengths, parts = packed_seq_params.sizes, []
        runs = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
        spans = [length * count for length, count in runs]
        cut = query.split([span // cp for span in spans]), key.split(spans), value.split(spans)
        images = [None] * len(runs) if attention_mask is None else attention_mask[0].split(spans)
        for (length, count), q, k, v, seen in zip(runs, *cut, images, strict=True):
            q = q.unflatten(0, (count, length // cp)).transpose(1, 2)
            k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (k, v))
            out = self._attend(q, k, v, None if seen is None else seen.unflatten(0, (count, length)))
            parts.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> Tensor:
        """Attend with one kernel.

        The kernel treats a rank's two chunks of a sequence as two sequences. In each, it aligns the last query with
        the last key.
        """
        assert self.varlen is not None
        borders = seen_borders = packed.cu_seqlens_q
        longest, parts = packed.max_seqlen_q, 1
        if self._group is not None:
            parts = 2 * self._group.size()
            borders, seen_borders, seen = packed.seen_by_chunks(self._group.rank(), self._group.size())
            k, v = (x.index_select(0, seen) for x in (k, v))
        return self._one_kernel(q, k, v, borders, seen_borders, longest // parts, longest).flatten(1)

    def _one_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, borders: Tensor, seen_borders: Tensor, longest: int, most_seen: int
    ) -> Tensor:
        assert self.varlen is not None
        window = (-1 if self._window is None else self._window - 1, 0)
        shares = q.size(1) != k.size(1)
        out: Tensor = self.varlen(
            q,
            k,
            v,
            borders,
            seen_borders,
            longest,
            most_seen,
            scale=self._scale,
            window_size=window,
            enable_gqa=shares,
        )
        return out

    def _attend_tree(self, q: Tensor, k: Tensor, v: Tensor, part: TreePart) -> Tensor:
        """Attend over a prefix tree. Spans support no windows and no sinks, and need values as wide as keys."""
        plain = self._window is None and self.softmax_offset is None and q.size(-1) == v.size(-1)
        if self.varlen is not None:
            k, v = (x.index_select(0, part.placed["path_places"]) for x in (k, v))
            borders = part.placed["piece_borders"], part.placed["path_borders"]
            out = self._one_kernel(q, k, v, *borders, part.longest_piece, part.tree.longest)
        elif plain and q.device.type == "cpu":
            out = SpanAttention.apply(q, k, v, part, self._scale)
        else:
            out = attend_by_pieces(q, k, v, part, self._window, self._attend_last)
        return out.flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, images: Tensor | None) -> Tensor:
        if images is not None:
            return self._attend_masked(q, k, v, mask_with_images(images, q.size(2), self._window, self._group))
        if self._group is None:
            return self._attend_last(q, k, v)
        parts = []
        for part, number in zip(q.chunk(2, dim=2), chunks_of(self._group.rank(), self._group.size()), strict=True):
            end = (number + 1) * part.size(2)
            parts.append(self._attend_last(part, k[:, :, :end], v[:, :, :end]))
        return torch.cat(parts, dim=2)

    def _attend_last(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from queries of the last tokens to the keys and values of all tokens."""
        total, mask = k.size(2), None
        before, window = total - q.size(2), self._window or total
        if before or total > window:
            mask = (
                torch.ones(q.size(2), total, dtype=torch.bool, device=q.device).tril(before).triu(before + 1 - window)
            )
        return self._attend_masked(q, k, v, mask)

    def _attend_masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to the keys for which ``mask`` is true. None selects the causal mask."""
        shares, scale = q.size(1) != k.size(1), self._scale
        if (sinks := self.softmax_offset) is not None:
            scale = scale or q.size(-1) ** -0.5
            q, k, v = _with_sinks(q, k, v, sinks / scale)
            mask = mask if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
        if shares and q.is_cuda and q.size(-1) > MAX_FLASH_SIZE:
            # Otherwise torch stores the weights of all pairs: its other kernel needs a key head for each query head.
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
            shares = False
        attend = attend_in_fixed_order if self.in_fixed_order else F.scaled_dot_product_attention
        out = attend(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shares)
        return out if sinks is None else out[:, :, 1:]


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put a token with value zero in front of [b, heads, s, d]. All queries see it.

    Its dot products with the queries are ``sinks`` [heads], before scaling. The weights of a head then add up to less
    than one, because the sink takes the rest (OpenAI 2025, arXiv 2508.10925). This works with any attention kernel.
    """
    q = torch.cat([q, sinks[None, :, None, None].expand(*q.shape[:-1], 1)], dim=-1)
    k = F.pad(F.pad(k, (0, 1)), (0, 0, 1, 0))
    token = torch.zeros(k.size(-1), dtype=k.dtype, device=k.device)
    token[-1] = 1.0
    k = torch.cat([token.expand(*k.shape[:2], 1, -1), k[:, :, 1:]], dim=2)
    return F.pad(q, (0, 0, 1, 0)), k, F.pad(v, (0, 0, 1, 0))


def with_trees(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Derive a core attention from Transformer Engine's that computes prefix trees with ``SDPACoreAttention``.

    In a tree, keys and queries differ in length. Transformer Engine (2.17) then does not support context parallelism,
    and its fused attention aligns the causal mask to the upper left.
    """

    class TreeAttention(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.of_trees = SDPACoreAttention(*args, **kwargs)
            self.of_trees._parameters.pop("softmax_offset", None)  # it uses the offset of the outer module

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            *args: Any,
            packed_seq_params: PackedSequences | None = None,
            **kwargs: Any,
        ) -> Tensor:
            if packed_seq_params is None or packed_seq_params.tree is None:
                kwargs["packed_seq_params"] = packed_seq_params
                out: Tensor = super().forward(query, key, value, attention_mask, *args, **kwargs)
                return out
            vars(self.of_trees)["softmax_offset"] = getattr(self, "softmax_offset", None)
            out = self.of_trees(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
            return out

    return TreeAttention


def attend_in_fixed_order(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute ``scaled_dot_product_attention`` with its ``options`` in a fixed order.

    A mask in ``options`` gets no gradient.
    """
    out: Tensor = _InFixedOrder.apply(partial(F.scaled_dot_product_attention, **options), query, key, value)
    return out


class _InFixedOrder(torch.autograd.Function):
    """Run the attention in a separate autograd graph, so that torch is strict in its backward pass and nowhere else."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with torch.enable_grad(), _strict():
            ctx.out = attend(*ctx.inputs)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        learned = [x for x in ctx.inputs if x.requires_grad]
        with _strict():
            gradients = iter(torch.autograd.grad(ctx.out, learned, grads[0]))
        by_input = [next(gradients) if x.requires_grad else None for x in ctx.inputs]
        ctx.inputs = ctx.out = None  # free the graph and its saved tensors
        return None, *by_input


@contextmanager
def _strict() -> Iterator[None]:
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
