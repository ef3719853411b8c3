"""Describe packed sequences for all layers beforehand, so that no layer asks the device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlhf_mcore.mcore.prefix_attention import TreePart
from rlhf_mcore.parallel.context import chunks_of


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's borders of sequences, and what layers here and Transformer Engine would compute of them, waiting for the device."""

    sizes: Sequence[int] = ()  # tokens of each sequence, over all context-parallel ranks
    order: Tensor | None = None  # with context parallelism: of ``parallel.context.order_of_ranks``
    pad_between_seqs: bool | None = False  # borders tell of padding as of tokens
    seen: tuple[Tensor, Tensor, Tensor] | None = None  # of ``seen_by_chunks``, which all layers share
    tree: TreePart | None = None  # the sequences are segments of a prefix tree

    @classmethod
    def of(cls, borders: Tensor, places: Tensor, sizes: Sequence[int], order: Tensor | None) -> PackedSequences:
        """Describe sequences on the device.

        Args:
            borders: [num_sequences + 1] int32, over all context-parallel ranks.
            places: [N] int64 of this rank's tokens in their sequences.
            sizes: of the sequences.
            order: with context parallelism, [sum of sizes] int64.
        """
        borders.places = places  # type: ignore[attr-defined]  # goes where Megatron takes the borders
        padded = None if order is None else borders  # what Transformer Engine cuts into chunks
        return cls("thd", borders, borders, padded, padded, max(sizes), max(sizes), sizes=sizes, order=order)

    def seen_by_chunks(self, rank: int, cp: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens that a context-parallel rank's two chunks of each sequence attend to, under a causal mask.

        Computed on the device, where the host need not wait for it.

        Returns:
            The borders [2 * num_sequences + 1] int32 of the rank's chunks back to back, the borders of the tokens that each chunk
            sees, and the places of these tokens [sum(sizes) * (2 * cp + 1) / (2 * cp)] among all.
        """
        if self.seen is None:
            begins, total = self.cu_seqlens_q[:-1], sum(self.sizes) // (2 * cp) * (2 * cp + 1)
            chunk = self.cu_seqlens_q.diff() // (2 * cp)
            counts = torch.stack([(number + 1) * chunk for number in chunks_of(rank, cp)], dim=1).flatten()
            borders, seen = (F.pad(each.cumsum(0, dtype=torch.int32), (1, 0)) for each in (_twice(chunk), counts))
            offsets = (_twice(begins) - seen[:-1]).repeat_interleave(counts, output_size=total)
            self.seen = borders, seen, torch.arange(total, device=offsets.device) + offsets
        return self.seen


def _twice(x: Tensor) -> Tensor:
    """[n] -> [2 * n], each element two times."""
    return x[:, None].expand(-1, 2).flatten()


def rotate_packed() -> None:
    """Let Megatron rotate packed tokens by their places.

    Its own asks the device for the borders, in every layer for queries and for keys, and cuts the angles for each sequence.
    """
    if hasattr(plain := rope_utils._apply_rotary_pos_emb_thd, "__wrapped__"):
        return

    @wraps(plain)
    def rotate(
        t: Tensor, cu_seqlens: Tensor, freqs: Tensor, *turns: bool, cp_group: Any = None, **kinds: Any
    ) -> Tensor:
        """Rotate ``t`` [N, heads, dim]; ``freqs`` [longest, 1, 1, dim]."""
        if (places := getattr(cu_seqlens, "places", None)) is None:
            return plain(t, cu_seqlens, freqs, *turns, cp_group=cp_group, **kinds)
        angles = freqs.index_select(0, places)
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), angles, *turns, **kinds).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = rotate
    if (fused := rope_utils.fused_apply_rotary_pos_emb_thd) is None:
        return

    @wraps(fused)
    def rotate_fused(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, **options: Any) -> Tensor:
        """Transformer Engine begins each sequence at position 0. A segment of a prefix tree begins where its parent ends."""
        if not getattr(cu_seqlens, "is_tree", False):
            return fused(t, cu_seqlens, freqs, **options)
        angles = freqs.index_select(0, cu_seqlens.places)  # type: ignore[attr-defined]
        turns = {name: value for name, value in options.items() if name == "interleaved"}
        return rope_utils.fused_apply_rotary_pos_emb(t.unsqueeze(1), angles, **turns).squeeze(1)

    rope_utils.fused_apply_rotary_pos_emb_thd = rotate_fused


def tell_of_padding(modules: Iterable[torch.nn.Module]) -> None:
    """Let Transformer Engine's attention be told that there is no padding between sequences: it would compare their borders."""
    for module in modules:
        if (names := getattr(module, "kept_packed_seq_params", None)) is None:
            continue
        # Transformer Engine's own, behind Megatron's and ours
        attention: Any = [kind for kind in type(module).__mro__ if kind.__name__ != "TreeAttention"][1]
        if "pad_between_seqs" in inspect.signature(attention.forward).parameters:
            names.add("pad_between_seqs")
