"""The comparison that the tests of ranks rely on."""

from __future__ import annotations

import pytest
import torch

from tests.difference import any_rank, first_difference

A, B = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2)


@pytest.mark.parametrize(
    ("found", "tolerance", "text"),
    [
        ({"b": B, "a": A}, 0.0, ""),
        ({"a": A + 1e-6, "b": B}, 1e-5, ""),
        ({"a": torch.tensor([[1.0, 2.0], [5.0, 5.0]]), "b": B}, 0.5, "a[1, 0] is 5.0, expected 3.0 (2 of 4 differ)"),
        ({"a": A, "b": torch.tensor([1.0, float("nan")])}, 9.0, "b[1] is nan, expected 1.0 (1 of 2 differ)"),
        ({"a": A}, 0.0, "b is missing"),
        ({"a": A, "b": B, "c": B}, 0.0, "c is unexpected"),
        ({"a": A[0], "b": B}, 0.0, "a is torch.float32 [2], expected torch.float32 [2, 2]"),
        ({"a": A, "b": B.int()}, 0.0, "b is torch.int32 [2], expected torch.float32 [2]"),
    ],
)
def test_the_first_difference_is_named_with_both_values(
    found: dict[str, torch.Tensor], tolerance: float, text: str
) -> None:
    assert first_difference(found, {"a": A, "b": B}, tolerance) == text


def test_a_stream_of_tensors_is_read_to_its_end() -> None:
    stream = iter([("a", B), ("b", B), ("b", B)])
    assert first_difference(stream, {"a": A, "b": B}).startswith("a is")
    assert next(stream, None) is None


def test_the_rank_is_told() -> None:
    assert any_rank(["", "x is missing"]) == "rank 1: x is missing"
    assert any_rank(["", ""]) == ""
