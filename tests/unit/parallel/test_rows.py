"""Who owns rows, and how they move. Ranks are threads here; tests/distributed has processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mcore.parallel.rows import merge_rows, move_rows, owners_of, rows_by_rank
from tests.unit.parallel.world import ThreadGroup, run_ranks

LENGTHS = st.lists(st.integers(1, 40), min_size=0, max_size=30)


@given(LENGTHS, st.integers(1, 7))
def test_owners_have_nearly_equal_tokens(lengths: list[int], world_size: int) -> None:
    owners = owners_of(np.array(lengths, np.int64), world_size)
    counts = np.bincount(owners, minlength=world_size)
    assert counts.max() - counts.min() <= 1
    tokens = np.bincount(owners, weights=lengths, minlength=world_size)
    # Two rounds of the deal, there and back, differ by no more than the longest row.
    assert tokens.max() - tokens.min() <= 2 * max(lengths, default=0)


def test_owners_by_hand() -> None:
    # Longest first 9, 7, 5, 4, 2 to ranks 0, 1, 1, 0, 0.
    assert owners_of(np.array([5, 9, 2, 7, 4]), 2).tolist() == [1, 0, 0, 1, 0]


def test_rows_by_rank_are_ascending_and_may_be_none() -> None:
    assert [rows.tolist() for rows in rows_by_rank(np.array([2, 0, 2, 0, 2]), 4)] == [[1, 3], [], [0, 2, 4], []]


@pytest.mark.usefixtures("rank_threads")
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=LENGTHS, data=st.data())
def test_rows_arrive_whole_and_in_the_order_that_is_wanted(lengths: list[int], data: st.DataObject) -> None:
    sizes, world = np.array(lengths, np.int64), 3
    holders = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(sizes), max_size=len(sizes))), np.int64)
    shared = np.array(data.draw(st.permutations(range(len(sizes)))), np.int64)[: len(sizes) // 2]
    everything = np.array(data.draw(st.permutations(range(len(sizes)))), np.int64)
    wanted = [shared, everything, shared]  # two ranks of a replica want the same rows

    def tokens(row: int) -> Tensor:
        return 100 * row + torch.arange(int(sizes[row]), dtype=torch.int32)

    def join_rows(rows: np.ndarray) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.int32), *(tokens(int(row)) for row in rows)])

    def body(group: ThreadGroup) -> dict[str, Tensor]:
        ids = join_rows(np.flatnonzero(holders == group.rank()))
        return move_rows({"token_ids": ids, "logprobs": -ids.float(), "mask": ids % 2 == 0}, sizes, holders, wanted)

    for rank, found in enumerate(run_ranks(world, body)):
        expected = join_rows(wanted[rank])
        assert torch.equal(found["token_ids"], expected) and found["token_ids"].dtype == torch.int32
        assert torch.equal(found["logprobs"], -expected.float()) and torch.equal(found["mask"], expected % 2 == 0)


@pytest.mark.usefixtures("rank_threads")
def test_numbers_of_rows_come_together_on_all() -> None:
    owners = torch.tensor([2, 0, 2, 1])  # the fourth rank owns nothing
    exact = torch.tensor([[9.0, 0.1], [1e-30, -7.25], [3e30, 1 / 3], [float("inf"), 5e-324]], dtype=torch.float64)

    def body(group: ThreadGroup) -> Tensor:
        return merge_rows(torch.where((owners == group.rank())[:, None], exact, 0.0))

    assert all(torch.equal(found, exact) for found in run_ranks(4, body))  # to the last bit
