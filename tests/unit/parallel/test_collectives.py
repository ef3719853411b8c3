"""A world of one, and ranks that are threads. Ranks that hold different amounts are in tests/distributed."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.parallel import collectives
from rlhf_mcore.parallel.collectives import (
    RankFailure,
    all_gather_json,
    all_gather_rows,
    broadcast_json,
    gather_failures,
    gather_json,
    on_every_rank,
    reduce_sums,
)
from tests.messages import expect_error

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


# ---------------------------------------------------------------------------------------------- what only some ranks know
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
    monkeypatch.setattr(collectives, "all_gather_json", lambda mine, group: [mine, *theirs])
    with expect_error(ConfigError, field="tensor b"):
        on_every_rank(lambda: done.append("loaded"))
    assert done == ["loaded"]


def test_a_bug_is_not_hidden() -> None:
    def broken() -> None:
        raise KeyError("no rule")

    with pytest.raises(KeyError, match="no rule"):
        on_every_rank(broken)
