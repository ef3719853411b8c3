"""Rectangles: intersections, what is left of one without another, and cuts, against boolean masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlhf_mcore.bridge.map.pieces import Rectangle, bounding_box, gaps, to_intervals, whole

SHAPE = (5, 4, 3)


@st.composite
def rectangles(draw: st.DrawFn, axes: int) -> Rectangle:
    spans = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in SHAPE[:axes]]
    return Rectangle(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


def mask(*given: Rectangle, axes: int) -> NDArray[np.int64]:
    """How many of the rectangles hold each element."""
    held = np.zeros(SHAPE[:axes], dtype=np.int64)
    for rectangle in given:
        held[rectangle.slices()] += 1
    return held


@given(st.data(), st.integers(0, 3))
def test_intersections_and_differences_are_those_of_sets(data: st.DataObject, axes: int) -> None:
    a, b = data.draw(rectangles(axes)), data.draw(rectangles(axes))
    shared = a.intersection(b)
    both = (mask(a, axes=axes) > 0) & (mask(b, axes=axes) > 0)
    assert (shared is not None) == bool(both.any())
    if shared is not None:
        assert np.array_equal(mask(shared, axes=axes), both)
        clipped = a.clipped_to(b)
        assert clipped is not None and clipped == shared.relative_to(b.start)
        assert np.array_equal(mask(a, axes=axes)[b.slices()][clipped.slices()], both[shared.slices()])
        assert shared.slices(b.start) == clipped.slices()
    if a.numel:
        assert np.array_equal(mask(*a.without(b), axes=axes), (mask(a, axes=axes) > 0) & ~both)
    inside = bool(((mask(b, axes=axes) > 0) & ~(mask(a, axes=axes) > 0)).any())
    if b.numel and a.numel:
        assert a.contains(b) == (not inside)


@given(st.data(), st.integers(1, 3), st.integers(1, 9))
def test_slabs_are_disjoint_and_nearly_equal(data: st.DataObject, axes: int, count: int) -> None:
    window = data.draw(rectangles(axes).filter(lambda rectangle: rectangle.numel > 0))
    axis = data.draw(st.integers(0, axes - 1))
    parts = window.slabs(axis, count)
    assert len(parts) == min(count, window.shape[axis])
    assert np.array_equal(mask(*parts, axes=axes), mask(window, axes=axes))
    sizes = {part.shape[axis] for part in parts}
    assert max(sizes) - min(sizes) <= 1


def test_a_bounding_box_is_the_smallest() -> None:
    assert bounding_box([Rectangle((3, 1), (1, 1)), Rectangle((0, 2), (2, 5))]) == ((0, 1), (4, 6))
    assert bounding_box([whole(())]) == ((), ())


def test_nothing_outside_and_nothing_of_other_axes_is_contained() -> None:
    box = whole((4, 4))
    assert box.contains(Rectangle((3, 0), (1, 4)))
    for start, shape in [((3, 0), (2, 4)), ((-1, 0), (1, 1)), ((0, 0), (-1, 1)), ((0,), (1,)), ((0, 0), (1,))]:
        assert not box.contains(Rectangle(start, shape)), (start, shape)


def test_gaps_are_what_is_left() -> None:
    left = gaps((4, 4), [Rectangle((0, 0), (4, 2)), Rectangle((0, 2), (1, 2))])
    assert left == [((1, 2), (3, 2))]
    assert gaps((2, 2), [whole((2, 2))]) == []


def test_what_is_written_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="written twice"):
        gaps((4,), [Rectangle((0,), (3,)), Rectangle((2,), (2,))])


def test_intervals_of_a_vocabulary_and_of_columns() -> None:
    # 97 rows of 128 are real: 97 * 64 = 6208, 128 * 64 = 8192.
    assert to_intervals((128, 64), [Rectangle((97, 0), (31, 64))]) == ((6208, 8192),)
    assert to_intervals((2, 4), [Rectangle((0, 3), (2, 1))]) == ((3, 4), (7, 8))
    assert to_intervals((2, 4), [Rectangle((0, 2), (1, 2)), Rectangle((1, 0), (1, 1))]) == ((2, 5),)
