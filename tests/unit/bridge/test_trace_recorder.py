"""Record loaders without vLLM. Every habit of a loader occurs, on meta tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.bridge.map.trace import Recorder

Loader = Callable[[Tensor, Tensor], object]


def record(loader: Loader, source_shape: tuple[int, ...], shape: tuple[int, ...]) -> tuple[list[Piece], str]:
    source = torch.empty(source_shape, device="meta")
    parameter = torch.nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    recorder = Recorder({"w": source}, {"p": parameter})
    with recorder:
        loader(parameter, source)
    return recorder.of(("p",))[0], recorder.opaque(("p",))


def fused_with_padding(parameter: Tensor, source: Tensor) -> None:
    parameter.data.narrow(0, 2, 4).copy_(source.narrow(0, 4, 4))
    parameter.data[6:].fill_(0)


@pytest.mark.parametrize(
    ("loader", "source_shape", "shape", "pieces"),
    [
        (lambda p, s: p.data.copy_(s), (4, 3), (4, 3), [Piece("w", (0, 0), (4, 3), 0, (3, 1))]),
        (fused_with_padding, (8, 3), (8, 3), [Piece("w", (4, 0), (4, 3), 6, (3, 1))]),
        (lambda p, s: p.__setitem__(slice(1, 3), s[:2]), (4, 3), (3, 3), [Piece("w", (0, 0), (2, 3), 3, (3, 1))]),
        (lambda p, s: p.data[1].copy_(s.chunk(2)[1].t()), (4, 3), (2, 3, 2), [Piece("w", (2, 0), (2, 3), 6, (1, 2))]),
        (lambda p, s: p.copy_(s[:, 2:].mT.contiguous()), (2, 4), (2, 2), [Piece("w", (0, 2), (2, 2), 0, (1, 2))]),
        (lambda p, s: p.copy_(s.zero_()), (2, 2), (2, 2), []),
        (lambda p, s: p.data.fill_(s.item()), (1,), (1,), [Piece("w", (0,), (1,), 0, (1,))]),
        (lambda p, s: p.data.copy_(s.to(torch.float32)), (2, 2), (2, 2), [Piece("w", (0, 0), (2, 2), 0, (2, 1))]),
    ],
    ids=[
        "whole",
        "narrowed",
        "assigned",
        "transposed chunk",
        "made contiguous",
        "emptied",
        "scalar",
        "cast that is none",
    ],
)
def test_habits_of_loaders(
    loader: Loader, source_shape: tuple[int, ...], shape: tuple[int, ...], pieces: list[Piece]
) -> None:
    assert record(loader, source_shape, shape) == (pieces, "")


@pytest.mark.parametrize(
    "loader",
    [
        lambda p, s: p.data.copy_(-torch.exp(s)),
        lambda p, s: p.data.add_(s),
        lambda p, s: p.data.copy_(s.mul_(2)),
        lambda p, s: p.data.index_copy_(0, torch.tensor([1, 0, 2, 3], device="meta"), s),
    ],
    ids=["computed", "added", "changed before", "scattered"],
)
def test_what_is_not_a_copy_of_a_part_is_called_opaque(loader: Loader) -> None:
    pieces, reason = record(loader, (4, 3), (4, 3))
    assert pieces == []
    assert "computed values" in reason


def test_the_last_writer_of_a_place_counts() -> None:
    first, second = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")
    parameter = torch.empty(2, 3, device="meta")
    recorder = Recorder({"first": first, "second": second}, {"p": parameter})
    with recorder:
        parameter.copy_(first)
        parameter.copy_(second)
    assert [piece.hf_name for piece in recorder.of(("p",))[0]] == ["second"]


def test_live_tensors_are_left_alone() -> None:
    source, live = torch.empty(3, device="meta"), torch.arange(3.0)
    recorder = Recorder({"w": source}, {"bias": live})
    with recorder:
        live.copy_(source)
        live.fill_(9)
    assert live.tolist() == [0, 1, 2]
    assert recorder.of(("bias",))[0] == [Piece("w", (0,), (3,), 0, (1,))]
