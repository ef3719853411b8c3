"""Parts of a tensor cover it exactly once, whatever their shapes, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_mcore.bridge.files.formats.tiles import Tile, Tiled, check_tiles
from rlhf_mcore.config.errors import ConfigError

FULL = torch.arange(24.0).view(4, 6)
Rectangle = tuple[int, int, int, int]  # row, column, rows, columns


def build_tiled(*rectangles: Rectangle) -> Tiled:
    def tile(row: int, column: int, rows: int, columns: int) -> Tile:
        part = FULL[row : row + rows, column : column + columns]
        return Tile((row, column), (rows, columns), "file", lambda inside: part[inside])

    return Tiled(torch.float32, (4, 6), [tile(*rectangle) for rectangle in rectangles])


@pytest.mark.parametrize(
    "rectangles",
    [
        [(0, 0, 4, 6)],
        [(0, 0, 3, 6), (3, 0, 1, 6)],
        [(0, 0, 2, 4), (0, 4, 2, 2), (2, 0, 2, 4), (2, 4, 2, 2)],
        [(0, 0, 1, 6), (1, 0, 3, 1), (1, 1, 2, 5), (3, 1, 1, 5)],  # no grid
        [(2, 0, 2, 6), (0, 0, 2, 3), (0, 3, 2, 3)],  # in another order
    ],
)
def test_tilings(rectangles: list[Rectangle]) -> None:
    tensor = build_tiled(*rectangles)
    check_tiles("x", tensor, Path("here"))
    for row, column, rows, columns in [(0, 0, 4, 6), (1, 2, 3, 3), (3, 5, 1, 1)]:
        out = torch.empty(rows, columns)
        tensor.read_into(out, (), (row, column))
        assert torch.equal(out, FULL[row : row + rows, column : column + columns])
    for row in range(4):
        out = torch.empty(2)
        tensor.read_into(out, (row,), (3,))
        assert torch.equal(out, FULL[row, 3:5])


@pytest.mark.parametrize(
    ("rectangles", "message"),
    [
        ([], "24 of the 24 elements of x are in no file"),
        ([(0, 0, 4, 5)], "4 of the 24 elements of x are in no file"),
        ([(0, 0, 2, 6), (2, 0, 2, 6), (2, 0, 2, 6)], "parts of x overlap"),
        ([(0, 0, 2, 6), (1, 0, 2, 6)], "parts of x overlap"),  # as many elements as there are, but row 3 is in none
        ([(0, 0, 4, 7)], "a part of x reaches outside"),
        ([(-1, 0, 5, 6)], "a part of x reaches outside"),
        ([(0, 0, -4, -6)], "a part of x reaches outside"),
    ],
)
def test_what_is_no_tiling(rectangles: list[Rectangle], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tiles("x", build_tiled(*rectangles), Path("here"))
