"""Compare copies between strided views, as rectangles, with torch's own copies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.bridge.map.pieces import Piece, contiguous_strides, view
from rlhf_mcore.bridge.map.strided import View, copied_pieces, covered_rectangles


def as_view(tensor: torch.Tensor) -> View:
    return View(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def decode(source: torch.Tensor, full: torch.Tensor, destination: torch.Tensor) -> list[Piece]:
    return copied_pieces("w", tuple(full.shape), as_view(source.expand(destination.shape)), as_view(destination))


def test_a_row_slice_into_a_fused_weight() -> None:
    full, fused = torch.empty(8, 4), torch.empty(12, 4)
    # Rows 4 to 7 of the tensor to rows 6 to 9 of the fused one: element 6 * 4 = 24.
    assert decode(full[4:8], full, fused[6:10]) == [Piece("w", (4, 0), (4, 4), 24, (4, 1))]


def test_a_column_slice_is_one_rectangle() -> None:
    full, local = torch.empty(3, 8), torch.empty(3, 4)
    assert decode(full[:, 4:], full, local) == [Piece("w", (0, 4), (3, 4), 0, (4, 1))]


def test_one_expert_of_a_stack() -> None:
    full, local = torch.empty(2, 3), torch.empty(5, 2, 3)
    assert decode(full, full, local[4]) == [Piece("w", (0, 0), (2, 3), 24, (3, 1))]
    assert decode(local[1], local, full) == [Piece("w", (1, 0, 0), (1, 2, 3), 0, (6, 3, 1))]


def test_a_transposed_copy_keeps_its_strides() -> None:
    full, local = torch.empty(4, 6), torch.empty(6, 4)
    assert decode(full.t(), full, local) == [Piece("w", (0, 0), (4, 6), 0, (1, 4))]


def test_a_single_row_is_described_like_many() -> None:
    full, local = torch.empty(7, 5), torch.empty(1, 5)
    assert decode(full[6:], full, local) == [Piece("w", (6, 0), (1, 5), 0, (5, 1))]


def test_flattened_whole_rows_are_one_rectangle() -> None:
    full, local = torch.empty(6, 4), torch.empty(8)
    assert decode(full.view(-1)[8:16], full, local) == [Piece("w", (2, 0), (2, 4), 0, (4, 1))]


def test_every_second_row_is_a_rectangle_each() -> None:
    full, local = torch.empty(4, 3), torch.empty(2, 3)
    assert [piece.start for piece in decode(full[::2], full, local)] == [(0, 0), (2, 0)]


SELECTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t,
    lambda t: t[1:],
    lambda t: t[..., 1:3],
    lambda t: t[2],
    lambda t: t[::2],
    lambda t: t.transpose(0, 1),
    lambda t: t.reshape(-1),
    lambda t: t.reshape(-1)[5:11],
    lambda t: t.unsqueeze(1),
    lambda t: t.chunk(2, 0)[1],
    lambda t: t.reshape(2, -1, t.shape[-1])[:, 1],
]


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.sampled_from([4, 6]), min_size=2, max_size=3),
    picks=st.lists(st.sampled_from(SELECTIONS), min_size=1, max_size=3),
    layout=st.sampled_from(["packed", "rows apart", "transposed"]),
)
def test_replaying_pieces_is_the_copy(
    shape: list[int], picks: list[Callable[[torch.Tensor], torch.Tensor]], layout: str
) -> None:
    full = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    source = full
    for pick in picks:
        try:
            source = pick(source)
        except (IndexError, RuntimeError):  # the selection exceeds this shape
            continue
    if source.untyped_storage().data_ptr() != full.untyped_storage().data_ptr() or source.numel() == 0:
        return  # torch made a copy
    flat, replayed = torch.zeros(3 * full.numel() + 50), torch.zeros(3 * full.numel() + 50)
    strides = contiguous_strides(source.shape)
    if layout == "rows apart":
        strides = tuple(2 * stride for stride in strides)
    if layout == "transposed":
        strides = tuple(reversed(contiguous_strides(tuple(reversed(source.shape)))))
    target = flat.as_strided(source.shape, strides, 7)
    target.copy_(source)
    pieces = copied_pieces("w", tuple(shape), as_view(source), as_view(target))
    for piece in pieces:
        view(replayed, piece).copy_(full[piece.slices])
    assert torch.equal(replayed, flat)
    assert sum(piece.numel for piece in pieces) == source.numel()


def test_a_broadcast_is_written_everywhere() -> None:
    full, local = torch.arange(3.0), torch.zeros(2, 3)
    for piece in decode(full, full, local):
        view(local.view(-1), piece).copy_(full[piece.slices])
    assert local.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_scalar() -> None:
    full, local = torch.tensor(5.0), torch.zeros(1)
    assert decode(full, full, local) == [Piece("w", (), (), 0, ())]


def test_what_a_piece_covers_in_local_coordinates() -> None:
    piece = Piece("w", (8, 0), (2, 4), 24, (4, 1))
    assert covered_rectangles(piece, (10, 4)) == [((6, 0), (2, 4))]
    expert = Piece("w", (0, 0), (2, 3), 6, (3, 1))
    assert covered_rectangles(expert, (4, 2, 3)) == [((1, 0, 0), (1, 2, 3))]
