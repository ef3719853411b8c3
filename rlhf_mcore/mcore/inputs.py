"""Derive the inputs of a pass from its microbatches on the host, and copy all of them to the device in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_mcore.data.collate import computed_sizes, last_positions, sequence_ids
from rlhf_mcore.data.prefixes import PrefixTree
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.mcore.prefix_attention import TreePart
from rlhf_mcore.parallel.context import local_places, order_of_ranks
from rlhf_mcore.parallel.logprobs import Subsets
from rlhf_mcore.parallel.rows import take_tokens
from rlhf_mcore.platform import Platform
from rlhf_mcore.types import TEACHER_TOP, Microbatch

if TYPE_CHECKING:
    from rlhf_mcore.mcore.vision import ModelVision


@dataclass(frozen=True, slots=True)
class PassInputs:
    """Derive the inputs for this rank's passes and copy them to the device.

    ``with_padding``: also derive a padding mask, so that routers can exclude padding from load balancing.
    """

    groups: ModelGroups
    platform: Platform
    with_padding: bool = False
    vision: ModelVision | None = None

    @contextmanager
    def place(self, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        """Keep the microbatches' fields and derived tensors on the device within this block (``placed``)."""
        fields = [{**microbatch.fields, **self.derive(microbatch)} for microbatch in microbatches]
        copies = iter(self.platform.to_device([tensor for tensors in fields for tensor in tensors.values()]))
        for microbatch, tensors in zip(microbatches, fields, strict=True):
            microbatch.placed = {name: next(copies) for name in tensors}
        try:
            yield
        finally:
            for microbatch in microbatches:
                microbatch.placed = {}

    def derive(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Return the inputs of a pass that are not fields of the microbatch, by name, on the host.

        ``token_ids``, ``position_ids`` and ``padding`` contain the tokens of this context-parallel rank. ``targets``
        [n] and the teacher's distributions contain its tokens with logits, and ``counted`` [n] their positions. All
        other tensors contain the tokens of all ranks.

        For a prefix tree, ``token_ids``, ``position_ids``, ``padding`` and ``uses`` use the computed layout.
        ``counted`` then contains positions in the row layout, and ``hidden_at`` the positions of the hidden states.
        """
        tree, sizes = microbatch.tree, computed_sizes(microbatch)
        derived = {"sequence_ids": sequence_ids(microbatch)[0], "last_positions": last_positions(microbatch)}
        if tree is None:
            computed = {"token_ids": microbatch.token_ids, "position_ids": microbatch.position_ids}
            if self.with_padding:
                computed["padding"] = self._padding(microbatch)
        else:
            computed = {"token_ids": tree.token_ids[None], "position_ids": tree.positions[None]}
            if self.with_padding:
                computed |= {"padding": tree.uses[None] == 0, "uses": tree.uses[None]}
            derived["sources"] = tree.sources
            if self.platform.name == "cuda":  # there, one kernel can compute all pieces
                derived |= self._tree_part(tree).borders()
        derived |= {name: self.of_rank(microbatch, values) for name, values in computed.items()}
        if microbatch.cu_seqlens is not None:
            derived["borders"] = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        if (cp := self.groups.layout.cp) > 1:
            derived["order"] = order_of_ranks(sizes, cp)
        if self.vision is not None:
            derived |= self.vision.derive(microbatch, partial(self.of_rank, microbatch))
        if "labels" in microbatch.fields:
            rows, hidden = self._with_logits(microbatch)
            derived["targets"] = microbatch.fields["labels"].flatten()[rows]
            if (top := microbatch.fields.get(TEACHER_TOP)) is not None:
                derived[TEACHER_TOP] = top.flatten(0, 1)[rows]
            if tree is not None:
                derived |= {"counted": rows, "hidden_at": hidden}
            elif self._weights(microbatch) is not None:
                derived["counted"] = hidden
        if (subsets := self.subsets(microbatch)) is not None:
            derived |= {"subset_tokens": subsets.tokens, "subset_ids": subsets.ids, "is_cut": subsets.is_cut}
        return derived

    def in_rows(self, microbatch: Microbatch) -> Microbatch:
        """Return a placed microbatch without its prefix tree, for layers that compute whole rows."""
        if microbatch.tree is None:
            return microbatch
        rows = replace(microbatch, tree=None, placed={})
        derived = self.derive(rows)
        copies = self.platform.to_device(list(derived.values()))
        rows.placed = {**microbatch.placed, **dict(zip(derived, copies, strict=True))}
        return rows

    def subsets(self, microbatch: Microbatch) -> Subsets | None:
        """Return the ``support`` of this rank's tokens with logits, or None if there is none.

        It is on the device if the microbatch is placed.
        """
        if (support := microbatch.ragged.get("support")) is None:
            return None
        subsets, placed = Subsets.of(take_tokens(support, self._with_logits(microbatch)[0])), microbatch.placed
        if not placed:
            return subsets
        return replace(subsets, tokens=placed["subset_tokens"], ids=placed["subset_ids"], is_cut=placed["is_cut"])

    def of_rank(self, microbatch: Microbatch, values: Tensor) -> Tensor:
        """Select this context-parallel rank's values: [b, T, ...] for all computed tokens -> [b, T / cp, ...]."""
        cp = self.groups.layout.cp
        if cp == 1:
            return values
        return values[:, local_places(computed_sizes(microbatch), self.groups.cp_rank, cp)]

    def _with_logits(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Find this rank's tokens with logits.

        Return their positions [n] int64 in the flat row layout, and among this rank's hidden states.
        """
        count = microbatch.token_ids.size(0) * microbatch.width
        own = self.of_rank(microbatch, torch.arange(count).view(-1, microbatch.width)).flatten()
        rows, hidden = own, torch.arange(len(own))
        if microbatch.tree is not None:
            local = torch.full((count,), -1).index_copy(0, own, hidden)[microbatch.tree.sources]
            rows = (local >= 0).nonzero().flatten()
            hidden = local[rows]
        if (weights := self._weights(microbatch)) is None:
            return rows, hidden
        has_logits = weights.flatten()[rows] != 0
        return rows[has_logits], hidden[has_logits]

    @staticmethod
    def _weights(microbatch: Microbatch) -> Tensor | None:
        return microbatch.fields.get("weights", microbatch.fields.get("loss_mask"))

    def packed_sequences(self, microbatch: Microbatch) -> PackedSequences | None:
        """Describe the sequences or segments that a placed microbatch computes. Return None if it is padded."""
        if microbatch.cu_seqlens is None:
            return None
        placed, tree = microbatch.placed, microbatch.tree
        places = placed.get("places", placed["position_ids"]).flatten()
        packed = PackedSequences.of(placed["borders"], places, computed_sizes(microbatch), placed.get("order"))
        packed.lengths = [*microbatch.lengths, *[0] * (len(packed.sizes) - len(microbatch.lengths))]
        if tree is not None:
            # Megatron computes angles for this many positions
            packed.max_seqlen_q = packed.max_seqlen_kv = tree.longest
            placed["borders"].is_tree = True  # type: ignore[attr-defined]  # packed.py reads it
            packed.tree = replace(self._tree_part(tree), placed=placed)
        return packed

    def _tree_part(self, tree: PrefixTree) -> TreePart:
        return TreePart.of(tree, self.groups.cp_rank, self.groups.layout.cp)

    def _padding(self, microbatch: Microbatch) -> Tensor:
        """Return a mask that is True for the tokens that routers exclude from load balancing."""
        ids, count = sequence_ids(microbatch)
        real = torch.tensor(microbatch.lengths + [0] * (count - len(microbatch.lengths)))
        return microbatch.position_ids >= real[ids]
