"""Which tokens a context-parallel rank has."""

from __future__ import annotations

import torch

from rlhf_mcore.parallel.context import local_places, order_of_one, order_of_ranks
from rlhf_mcore.parallel.layout import ParallelLayout


def test_a_rank_has_a_chunk_from_each_end_of_every_sequence() -> None:
    assert local_places([8], 0, 2).tolist() == [0, 1, 6, 7]
    assert local_places([8], 1, 2).tolist() == [2, 3, 4, 5]
    assert local_places([4, 8], 0, 2).tolist() == [0, 3, 4, 5, 10, 11]
    assert local_places([8, 8], 2, 4).tolist() == [2, 5, 10, 13]


def test_the_order_of_one_sequence_is_that_of_its_ranks() -> None:
    assert order_of_one(8, 2, torch.device("cpu")).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert order_of_one(48, 4, torch.device("cpu")).equal(order_of_ranks([48], 4))


def test_tokens_that_layouts_can_share() -> None:
    def multiples(**cut: object) -> tuple[int, int]:
        layout = ParallelLayout(24, **cut)  # type: ignore[arg-type]
        return layout.sequence_multiple, layout.token_multiple

    assert multiples() == multiples(tp=2) == (1, 1)
    assert multiples(tp=2, sequence_parallel=True) == (1, 2)
    assert multiples(cp=2) == multiples(cp=2, tp=2, sequence_parallel=True) == (4, 4)
    assert multiples(cp=2, tp=4, sequence_parallel=True) == (4, 8)
    assert multiples(cp=4, tp=3, sequence_parallel=True) == (8, 24)
