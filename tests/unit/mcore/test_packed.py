"""Rotate packed tokens by given positions, like Megatron, without reading the borders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from rlhf_mcore.mcore.packed import PackedSequences, rotate_packed, tell_of_padding
from rlhf_mcore.parallel.context import local_places, order_of_ranks

SIZES = (8, 4, 12)


def group(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def angles(dim: int) -> Tensor:
    frequencies = torch.outer(torch.arange(max(SIZES)).float(), torch.tensor([1.0, 0.3, 0.05])[: dim // 2])
    return torch.cat([frequencies, frequencies], dim=-1)[:, None, None]


@pytest.mark.parametrize("dim", [6, 4])  # all elements of a head, and some of them
@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_is_megatrons_bit_for_bit(dim: int, cp: int, rank: int, dtype: torch.dtype) -> None:
    rotate_packed()
    heads = torch.randn(sum(SIZES) // cp, 2, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    borders = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
    settings = dict(rotary_interleaved=False, mscale=1.5, cp_group=group(cp, rank))
    expected = rope_utils._apply_rotary_pos_emb_thd(
        heads, borders, angles(dim), **settings
    )  # borders without positions
    places = torch.cat([torch.arange(size) for size in SIZES])
    own = places if cp == 1 else places[local_places(SIZES, rank, cp)]
    packed = PackedSequences.of(borders.to("meta"), own, SIZES, None)  # values of meta tensors cannot be read
    found = rope_utils._apply_rotary_pos_emb_thd(heads, packed.cu_seqlens_q, angles(dim), **settings)
    assert torch.equal(found, expected)
    assert not torch.equal(found, heads)


def test_what_layers_are_told() -> None:
    borders, places = torch.tensor([0, 8, 12, 24], dtype=torch.int32), torch.arange(24)
    alone = PackedSequences.of(borders, places, SIZES, None)
    assert (alone.qkv_format, alone.max_seqlen_q, alone.max_seqlen_kv) == ("thd", 12, 12)
    assert alone.cu_seqlens_q_padded is None and list(alone.sizes) == [8, 4, 12]
    shared = PackedSequences.of(borders, places, SIZES, order_of_ranks(SIZES, 2))
    assert shared.cu_seqlens_q_padded is borders and shared.cu_seqlens_kv_padded is borders
    assert shared.pad_between_seqs is False


class _Newer(torch.nn.Module):
    def forward(self, query: Tensor, pad_between_seqs: bool | None = None) -> None: ...


class _Older(torch.nn.Module):
    def forward(self, query: Tensor) -> None: ...


@pytest.mark.parametrize(("base", "expected"), [(_Newer, {"qkv_format", "pad_between_seqs"}), (_Older, {"qkv_format"})])
def test_attention_that_takes_it_is_told_of_padding(base: type[torch.nn.Module], expected: set[str]) -> None:
    class Attention(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.kept_packed_seq_params = {"qkv_format"}

        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    attention = Attention()
    tell_of_padding([torch.nn.Linear(1, 1), attention])
    assert attention.kept_packed_seq_params == expected
