"""A world of one, and ranks that are threads. Ranks that hold different amounts are in tests/distributed."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.parallel import collectives
from rlhf_mcore.parallel.collectives import (
    RankFailure,
    all_gather_json,
    all_gather_rows,
    broadcast_json,
    gather_failures,
    gather_json,
    merge_rows,
    merge_tokens,
    on_every_rank,
    reduce_sums,
    union,
)
from tests.unit.parallel.world import ThreadGroup, run_ranks

pytestmark = pytest.mark.usefixtures("world")

VALUES = [
    None,
    [],
    {},
    "",
    "Grüße, 東京 \U0001f600",
    {"a": [1, 2.5, None, True], "b": {"c": "d"}},
    [1e-300, 0.1, 2**53],
    "x" * 100_000,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_json_arrives_as_it_was_sent(value: object) -> None:
    assert all_gather_json(value) == [value]
    assert gather_json(value) == [value]
    assert broadcast_json(value, 0) == value


def test_numbers_without_a_json_name_arrive_too() -> None:
    (received,) = all_gather_json([float("nan"), float("inf"), -float("inf")])
    assert math.isnan(received[0]) and received[1:] == [float("inf"), -float("inf")]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_rows_of_any_number_come_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = torch.arange(math.prod(shape), dtype=dtype).reshape(shape)
    received = all_gather_rows(rows)
    assert received.dtype == dtype and received.shape == shape
    assert torch.equal(received, rows)


def test_sums_keep_double_precision_and_their_names() -> None:
    values = {"b": 1 / 3, "a_max": -2.0, "tokens": float(2**40 + 1)}
    assert reduce_sums(values) == {"a_max": -2.0, "b": 1 / 3, "tokens": 1099511627777.0}
    assert reduce_sums({}) == {}


def test_a_part_that_may_fail_hands_on_what_it_returns_or_raises() -> None:
    assert on_every_rank(lambda: 3) == 3
    with pytest.raises(ConfigError, match=r"^a\.b=1 is wrong$"):
        on_every_rank(lambda: _raise(ConfigError("a.b=1 is wrong")))
    with pytest.raises(ZeroDivisionError):
        on_every_rank(lambda: _raise(ZeroDivisionError("by zero")))


def test_failures_say_which_rank_and_what() -> None:
    assert gather_failures(None) == []
    full = OSError(28, "No space left on device", "/data/x")
    (failure,) = gather_failures(full)
    assert failure == RankFailure(0, "OSError", 28, "[Errno 28] No space left on device: '/data/x'")
    assert str(failure) == "rank 0: [Errno 28] No space left on device: '/data/x'"
    (other,) = gather_failures(KeyError("step"))
    assert str(other) == "rank 0: KeyError: 'step'"


def _raise(error: Exception) -> None:
    raise error


# ------------------------------------------------------------------------------------------------------ merging of rows
MASK = torch.tensor([[False, True, True], [False, True, False], [True, True, True], [False, False, False]])


def test_a_world_of_one_has_every_row() -> None:
    values = torch.arange(12.0).reshape(4, 3)
    merged = merge_tokens(values, MASK)
    assert merged.tolist() == [[0, 1, 2], [0, 4, 0], [6, 7, 8], [0, 0, 0]]
    assert values.tolist() == torch.arange(12.0).reshape(4, 3).tolist()
    assert merge_rows(torch.tensor([1.0, 0.0, -2.5])).tolist() == [1.0, 0.0, -2.5]


def test_no_rows_are_merged_to_no_rows() -> None:
    assert merge_tokens(torch.zeros(0, 1), torch.zeros(0, 1, dtype=torch.bool)).shape == (0, 1)
    assert merge_rows(torch.zeros(0)).shape == (0,)


@pytest.fixture
def threads_as_ranks(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Collectives over the world go to the group that a thread has put into ``here.group``."""
    here = threading.local()

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        here.group.reduce(tensor, op)

    monkeypatch.setattr(collectives.dist, "all_reduce", all_reduce)
    return here


def test_rows_of_several_ranks_come_together_on_all(threads_as_ranks: threading.local) -> None:
    owners = torch.tensor([2, 0, 2, 1])  # of each row; the fourth rank has none, and does not hold the model
    exact = torch.tensor([[9.0, 0.1, 1e-30], [9.0, -7.25, 9.0], [3e30, 1 / 3, -0.0], [9.0, 9.0, 9.0]])

    def body(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        threads_as_ranks.group = group
        mine = (owners == group.rank())[:, None]
        return merge_tokens(torch.where(mine, exact, 0.0), MASK), merge_rows(torch.where(mine[:, 0], exact[:, 1], 0.0))

    for tokens, rows in run_ranks(4, body):
        assert torch.equal(tokens, torch.where(MASK, exact, 0.0))  # to the last bit
        assert torch.equal(rows, exact[:, 1])


# ---------------------------------------------------------------------------------------------- what only some ranks know
def ranks_say(monkeypatch: pytest.MonkeyPatch, *before: Any, after: tuple[Any, ...] = ()) -> None:
    """Ranks before and after this one say so in a gathering."""
    monkeypatch.setattr(collectives, "all_gather_json", lambda mine: [*before, mine, *after])


def test_metrics_of_all_ranks_are_united(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"loss/value": 0.5}
    assert union(mine) == mine and union({}) == {}
    ranks_say(monkeypatch, {"loss/policy": 1.0, "both": 1.0}, after=({}, {"both": 3.0}))
    assert union(mine) == {"loss/policy": 1.0, "loss/value": 0.5, "both": 3.0}  # the last rank that knows a name speaks
    assert mine == {"loss/value": 0.5}


def test_a_part_that_goes_well_everywhere_gives_its_result() -> None:
    assert on_every_rank(lambda: 7) == 7
    assert on_every_rank(lambda: None) is None


def test_a_mistake_that_this_rank_finds_is_raised() -> None:
    def find() -> None:
        raise ConfigError("model.path=x is broken")

    with pytest.raises(ConfigError, match=r"model.path=x is broken"):
        on_every_rank(find)


def test_a_mistake_that_another_rank_finds_is_raised_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    theirs = [["ConfigError", None, "tensor b is missing"], ["ConfigError", None, "tensor c is missing"]]
    monkeypatch.setattr(collectives, "all_gather_json", lambda mine: [mine, *theirs])
    with pytest.raises(ConfigError, match="tensor b is missing"):
        on_every_rank(lambda: done.append("loaded"))
    assert done == ["loaded"]


def test_a_bug_is_not_hidden() -> None:
    def broken() -> None:
        raise KeyError("no rule")

    with pytest.raises(KeyError, match="no rule"):
        on_every_rank(broken)
