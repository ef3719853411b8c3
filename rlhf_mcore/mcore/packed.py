"""Describe packed sequences once for all layers, so that no layer waits for the device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
    """Megatron's sequence borders, and values derived from them.

    Without these values, our layers and Transformer Engine would each compute them and wait for the device.
    """

    sizes: Sequence[int] = ()  # tokens per sequence, over all context-parallel ranks
    lengths: Sequence[int] = ()  # the same without padding; not set for a prefix tree
    order: Tensor | None = None  # with context parallelism: result of ``parallel.context.order_of_ranks``
    pad_between_seqs: bool | None = False  # the borders include padding
    seen: tuple[Tensor, Tensor, Tensor] | None = None  # result of ``seen_by_chunks``, shared by all layers
    tree: TreePart | None = None  # set if the sequences are segments of a prefix tree
    # places of selected keys: by the number of a layer that uses another layer's, and the last selection at 0
    selections: dict[int, Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, borders: Tensor, places: Tensor, sizes: Sequence[int], order: Tensor | None) -> PackedSequences:
        """Describe sequences on the device.

        Args:
            borders: [num_sequences + 1] int32, over all context-parallel ranks.
            places: [N] int64 positions of this rank's tokens in their sequences.
            sizes: lengths of the sequences.
            order: with context parallelism, [sum of sizes] int64.
        """
        borders.places = places  # type: ignore[attr-defined]  # an attribute, because Megatron passes only the borders on
        padded = None if order is None else borders  # Transformer Engine splits these into chunks
        return cls("thd", borders, borders, padded, padded, max(sizes), max(sizes), sizes=sizes, order=order)

    def seen_by_chunks(self, rank: int, cp: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens that a context-parallel rank's two chunks of each sequence attend to, under a causal mask.

        They are computed on the device, so the host does not wait.

        Returns:
            The borders [2 * num_sequences + 1] int32 of the rank's chunks back to back. The borders of the tokens
            that each chunk sees. The positions of these tokens [sum(sizes) * (2 * cp + 1) / (2 * cp)] among all
            tokens.
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
    """Map [n] to [2 * n] by repeating each element."""
    return x[:, None].expand(-1, 2).flatten()


def rotate_packed() -> None:
    """Make Megatron rotate packed tokens by their positions.

    Megatron's version reads the borders from the device, in every layer, for queries and for keys. It also splits the
    angles for each sequence.
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
        """Rotate segments of a prefix tree from the end of their parent.

        Transformer Engine starts each sequence at position 0.
        """
        if not getattr(cu_seqlens, "is_tree", False):
            return fused(t, cu_seqlens, freqs, **options)
        angles = freqs.index_select(0, cu_seqlens.places)  # type: ignore[attr-defined]
        turns = {name: value for name, value in options.items() if name == "interleaved"}
        return rope_utils.fused_apply_rotary_pos_emb(t.unsqueeze(1), angles, **turns).squeeze(1)

    rope_utils.fused_apply_rotary_pos_emb_thd = rotate_fused


def tell_of_padding(modules: Iterable[torch.nn.Module]) -> None:
    """Pass ``pad_between_seqs`` to Transformer Engine's attention.

    Without it the attention compares borders on the device.
    """
    for module in modules:
        if (names := getattr(module, "kept_packed_seq_params", None)) is None:
            continue
        # Transformer Engine's class, below Megatron's and our subclass
        attention: Any = [kind for kind in type(module).__mro__ if kind.__name__ != "TreeAttention"][1]
        if "pad_between_seqs" in inspect.signature(attention.forward).parameters:
            names.add("pad_between_seqs")
