"""Derive what passes read of microbatches: on the host, and on the device before the first pass, by one copy for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_mcore.data.collate import last_positions, sequence_ids, sequence_sizes
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.parallel.ragged import take_tokens
from rlhf_mcore.platform import Platform
from rlhf_mcore.types import TEACHER_TOP, Microbatch

if TYPE_CHECKING:
    from rlhf_mcore.mcore.vision import Vision
    from rlhf_mcore.parallel.subsets import Subsets


@dataclass(frozen=True, slots=True)
class PassInputs:
    """Derives what this rank's passes read, and places it. ``with_padding``: routers leave padding out of the balance."""

    groups: ModelGroups
    platform: Platform
    with_padding: bool = False
    vision: Vision | None = None

    @contextmanager
    def place(self, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        """Keep the fields of microbatches, and what is derived of them, on the device within this block (``placed``)."""
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
        """Return what passes read of a microbatch beside its fields, by name, on the host.

        ``token_ids``, ``position_ids``, ``padding`` and the ``targets`` [n] and teacher's distributions of the tokens with logits, at
        places ``counted`` [n], are of this context-parallel rank; the rest is of all tokens.
        """
        derived = {
            "token_ids": self.of_rank(microbatch, microbatch.token_ids),
            "position_ids": self.of_rank(microbatch, microbatch.position_ids),
            "sequence_ids": sequence_ids(microbatch)[0],
            "last_positions": last_positions(microbatch),
        }
        if microbatch.cu_seqlens is not None:
            derived["borders"] = microbatch.cu_seqlens
        if (cp := self.groups.layout.cp) > 1:
            from rlhf_mcore.parallel.context import order_of_ranks

            derived["order"] = order_of_ranks(sequence_sizes(microbatch), cp)
        if self.vision is not None:
            derived |= self.vision.derive(microbatch, partial(self.of_rank, microbatch))
        if self.with_padding:
            derived["padding"] = self._padding(microbatch)
        if "labels" in microbatch.fields:
            derived["targets"] = self.of_rank(microbatch, microbatch.fields["labels"]).flatten()
            if (top := microbatch.fields.get(TEACHER_TOP)) is not None:
                derived[TEACHER_TOP] = self.of_rank(microbatch, top).flatten(0, 1)
            if (counted := self.counted(microbatch)) is not None:
                derived |= {name: derived[name][counted] for name in ("targets", TEACHER_TOP) if name in derived}
                derived["counted"] = counted
        if (subsets := self.subsets(microbatch)) is not None:
            derived |= {"subset_tokens": subsets.tokens, "subset_ids": subsets.ids, "is_cut": subsets.is_cut}
        return derived

    def subsets(self, microbatch: Microbatch) -> Subsets | None:
        """Return the ``support`` of this rank's tokens with logits, on the device where it is placed there; None without one."""
        if (support := microbatch.ragged.get("support")) is None:
            return None
        from rlhf_mcore.parallel.subsets import Subsets

        own = self.of_rank(
            microbatch, torch.arange(microbatch.token_ids.numel()).view_as(microbatch.token_ids)
        ).flatten()
        counted, placed = self.counted(microbatch), microbatch.placed
        subsets = Subsets.of(take_tokens(support, own if counted is None else own[counted]))
        if not placed:
            return subsets
        return replace(subsets, tokens=placed["subset_tokens"], ids=placed["subset_ids"], is_cut=placed["is_cut"])

    def of_rank(self, microbatch: Microbatch, values: Tensor) -> Tensor:
        """Return of [b, T, ...] values of a microbatch those at this context-parallel rank's places: [b, T / cp, ...]."""
        cp = self.groups.layout.cp
        if cp == 1:
            return values
        from rlhf_mcore.parallel.context import local_places

        return values[:, local_places(sequence_sizes(microbatch), self.groups.cp_rank, cp)]

    def counted(self, microbatch: Microbatch) -> Tensor | None:
        """Return the places [n] int64 of tokens with logits among this rank's tokens, on the host; None: all tokens have some."""
        weights = microbatch.fields.get("weights", microbatch.fields.get("loss_mask"))
        return None if weights is None else self.of_rank(microbatch, weights).flatten().nonzero().flatten()

    def packed(self, microbatch: Microbatch) -> PackedSequences | None:
        """Describe the sequences of a placed microbatch; None where it is padded."""
        if microbatch.cu_seqlens is None:
            return None
        placed = microbatch.placed
        places = placed.get("places", placed["position_ids"]).flatten()
        return PackedSequences.of(placed["borders"], places, sequence_sizes(microbatch), placed.get("order"))

    def _padding(self, microbatch: Microbatch) -> Tensor:
        """Return True at the tokens that routers leave out of the balance."""
        ids, count = sequence_ids(microbatch)
        real = torch.tensor(microbatch.lengths + [0] * (count - len(microbatch.lengths)))
        return self.of_rank(microbatch, microbatch.position_ids >= real[ids])
