from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mcore.parallel.layout import ParallelLayout

SIZES = st.integers(1, 5)


def groups(layout: ParallelLayout, axis: str) -> list[list[int]]:
    """Ranks that differ in one coordinate only."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        found.setdefault(tuple(place[name] for name in place if name != axis), []).append(rank)
    return sorted(found.values())


def test_the_example_of_megatrons_documentation() -> None:
    # parallel_state.initialize_model_parallel: 16 GPUs, tensor parallel 2, pipeline parallel 4.
    layout = ParallelLayout(16, tp=2, pp=4)
    assert layout.dp == 2
    assert groups(layout, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert groups(layout, "dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups(layout, "pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_context_parallel_ranks_lie_between_tensor_and_data_parallel_ones() -> None:
    layout = ParallelLayout(16, tp=2, cp=2, pp=2)
    assert layout.coordinates(11) == {"tp": 1, "cp": 1, "dp": 0, "pp": 1}
    assert layout.rank_of(tp=1, cp=1, dp=0, pp=1) == 11
    assert groups(layout, "cp")[:2] == [[0, 2], [1, 3]]
    assert groups(layout, "dp")[:2] == [[0, 4], [1, 5]]


@given(SIZES, SIZES, SIZES, SIZES)
def test_ranks_and_coordinates_are_inverse(tp: int, cp: int, dp: int, pp: int) -> None:
    layout = ParallelLayout(tp * cp * dp * pp, tp=tp, cp=cp, pp=pp)
    assert layout.dp == dp
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert all(0 <= place[axis] < size for axis, size in sizes.items())
        assert layout.rank_of(**place) == rank


def test_a_world_that_the_layout_does_not_fill_is_refused() -> None:
    with pytest.raises(ValueError, match=r"world size 12 is not a multiple of tp 2 x pp 4 x cp 1 = 8"):
        ParallelLayout(12, tp=2, pp=4)
