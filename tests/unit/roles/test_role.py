"""How a role takes its share of the rows of a step, and hands what it computed to all ranks.

In a world of one a data-parallel rank is a place given to the model; what ranks merge is the sum of what they say here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import TrainerConfig
from rlhf_mcore.data.collate import Row, make_train_batch
from rlhf_mcore.mcore.step import scalar_head
from rlhf_mcore.roles import role as module
from rlhf_mcore.roles.role import Role, minibatches
from rlhf_mcore.types import Microbatch, TrainBatch
from tests.unit.roles import lookup
from tests.unit.roles.lookup import Layout, Lookup

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Lookup:
    return Lookup(width=1).take_over(monkeypatch)


def role(model: Lookup | None, host_weights: Any = None, **trainer: Any) -> Role:
    which: Any = model
    settings: dict[str, Any] = dict(max_tokens_per_microbatch=64) | trainer
    return Role(which, Lookup.spec, TrainerConfig(**settings), host_weights=host_weights)  # type: ignore[arg-type]


def batch_of(lengths: list[int]) -> TrainBatch:
    """Rows of so many tokens, the first of which is the prompt; two to a prompt."""
    rows = [Row([1], [2] * (n - 1), [0.0] * (n - 1), 0.0) for n in lengths]
    return make_train_batch(rows, [k // 2 for k in range(len(rows))], 0)


def random_batch(seed: int, num_rows: int = 24) -> TrainBatch:
    lengths = torch.randint(2, 14, (num_rows,), generator=torch.Generator().manual_seed(seed))
    return batch_of(lengths.tolist())


def shares(model: Lookup, batch: TrainBatch, rows: list[int], dp: int) -> list[list[int]]:
    """Rows of each data-parallel rank."""
    found = []
    for rank in range(dp):
        model.layout, model.dp_rank = Layout(dp=dp), rank
        parts = role(model).microbatches(batch, rows, {})
        assert parts  # every rank takes part
        found.append([row for part in parts for row in part.rows])
    return found


# -------------------------------------------------------------------------------------------------------------- sharing
@pytest.mark.parametrize("dp", [1, 2, 4, 5])
def test_every_row_of_every_minibatch_has_one_rank(model: Lookup, dp: int) -> None:
    batch = random_batch(0)
    for rows in minibatches(batch, 5):
        assert sorted(row for share in shares(model, batch, rows, dp) for row in share) == rows


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_get_nearly_equal_tokens_of_every_minibatch(model: Lookup, dp: int, seed: int) -> None:
    batch = random_batch(seed)
    for rows in minibatches(batch, 4):
        tokens = [sum(int(batch.lengths[row]) for row in share) for share in shares(model, batch, rows, dp)]
        longest = max(int(batch.lengths[row]) for row in rows)
        assert max(tokens) - min(tokens) <= longest
        assert max(tokens) <= sum(tokens) / dp + longest / 2


def test_balance_by_hand(model: Lookup) -> None:
    # Each of two ranks gets one of each length.
    batch = batch_of([9, 9, 5, 5, 3, 3])
    for share in shares(model, batch, list(range(6)), 2):
        assert sorted(int(batch.lengths[row]) for row in share) == [3, 5, 9]


def test_more_ranks_than_rows_leave_some_with_a_dummy(model: Lookup) -> None:
    batch = batch_of([4, 4])
    found = shares(model, batch, [0, 1], 3)
    assert sorted(map(len, found)) == [0, 1, 1]
    model.dp_rank = found.index([])
    (dummy,) = role(model).microbatches(batch, [0, 1], {"weights": torch.ones(2, 4)})
    assert dummy.rows == [] and not dummy.fields["weights"].any()


def test_fields_travel_with_their_rows(model: Lookup) -> None:
    batch = random_batch(1)
    owner = torch.arange(24.0)[:, None].expand(batch.token_ids.shape)
    for rank in range(3):
        model.layout, model.dp_rank = Layout(dp=3), rank
        for part in role(model, packing=False).microbatches(batch, [2, 3, 8, 9, 20, 21], {"owner": owner}):
            for place, row in enumerate(part.rows):
                assert set(part.fields["owner"][place, : part.lengths[place] - 1].tolist()) == {float(row)}


# ---------------------------------------------------------------------------------------------------------- minibatches
def test_minibatches_are_consecutive_prompts() -> None:
    batch = random_batch(0, num_rows=16)  # eight prompts
    assert minibatches(batch, 3) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15]]
    assert minibatches(batch, 8) == minibatches(batch, 100) == [list(range(16))]
    assert minibatches(batch, 1) == [[k, k + 1] for k in range(0, 16, 2)]


@pytest.mark.parametrize("seed", range(3))
def test_minibatches_depend_on_the_prompts_only(seed: int) -> None:
    assert minibatches(random_batch(seed), 5) == minibatches(batch_of([3] * 24), 5)


# --------------------------------------------------------------------------------------------------------- microbatches
@pytest.mark.parametrize("packing", [True, False])
def test_microbatches_suit_the_layout(model: Lookup, packing: bool) -> None:
    batch = lookup.batch()
    model.layout = Layout(tp=4, pp=3, vpp=2, sequence_parallel=True)
    which = role(model, max_tokens_per_microbatch=12, packing=packing)
    parts = which.microbatches(batch, list(range(6)), {})
    assert len(parts) % 3 == 0  # an interleaved pipeline wants a multiple of its stages
    assert all(part.token_ids.size(1) % 4 == 0 for part in parts)  # sequence parallelism cuts tokens in four
    assert all(part.token_ids.numel() <= 12 for part in parts)
    assert sorted(row for part in parts for row in part.rows) == list(range(6))
    model.layout = Layout(tp=4, pp=3)
    parts = which.microbatches(batch, [0, 3], {})
    assert sum(part.token_ids.numel() for part in parts) >= sum(int(batch.lengths[row]) for row in (0, 3))
    assert sorted(row for part in parts for row in part.rows) == [0, 3]


def test_ranks_that_share_experts_run_equally_many_microbatches(model: Lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of([6, 6, 6, 6])
    counts = []

    def busier(values: dict[str, float], group: object) -> dict[str, float]:
        """Another rank has five."""
        assert group is model.groups.collection.dp
        counts.append(values["count_max"])
        return {"count_max": 5.0}

    monkeypatch.setattr(module, "reduce_sums", busier)
    which = role(model, max_tokens_per_microbatch=12)
    assert len(which.microbatches(batch, [0, 1, 2, 3], {})) == 2 and counts == []
    model.layout = Layout(ep=2, dp=1)
    parts = which.microbatches(batch, [0, 1, 2, 3], {})
    assert len(parts) == 5 and counts == [2.0]
    assert sorted(row for part in parts for row in part.rows) == [0, 1, 2, 3]


# -------------------------------------------------------------------------------------------------------------- results
def expected(model: Lookup, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Row by row, token by token: what the model says one token before, and after the last."""
    says = model.table.detach().squeeze(1).tolist()
    tokens, rows = torch.zeros(batch.token_ids.shape), torch.zeros(len(batch.lengths))
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.token_ids[row].tolist()
        for t in batch.loss_mask[row].nonzero().flatten().tolist():
            tokens[row, t] = says[ids[t - 1]]
        rows[row] = says[ids[length - 1]]
    return tokens, rows


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("max_tokens", [8, 64])
def test_values_by_token_and_by_row(model: Lookup, packing: bool, max_tokens: int) -> None:
    batch = lookup.batch()
    tokens, rows = expected(model, batch)
    which = role(model, packing=packing, max_tokens_per_microbatch=max_tokens)
    assert torch.equal(which.per_token(batch, scalar_head), tokens)
    assert torch.equal(which.per_row(batch, scalar_head), rows)
    model.calls.clear()
    both = which.per_token_and_row(batch, scalar_head)
    assert torch.equal(both[0], tokens) and torch.equal(both[1], rows)
    assert len(model.calls) == 1 and (len(model.calls[0][1]) > 1) == (max_tokens == 8)  # one run for both


@pytest.mark.parametrize("dp", [2, 3, 8])
def test_what_the_ranks_say_adds_up(model: Lookup, dp: int) -> None:
    batch = lookup.batch()
    model.layout = Layout(dp=dp)
    tokens, rows, count = torch.zeros(batch.token_ids.shape), torch.zeros(6), torch.zeros(6)
    for model.dp_rank in range(dp):
        mine, last = role(model).per_token_and_row(batch, scalar_head)
        tokens, rows, count = tokens + mine, rows + last, count + mine.any(1)
    assert torch.equal(tokens, expected(model, batch)[0]) and torch.equal(rows, expected(model, batch)[1])
    assert count.tolist() == [1.0] * 6  # one owner each, so nothing is rounded


@pytest.mark.parametrize("silent", [dict(tp_rank=1), dict(is_last_stage=False)])
def test_one_rank_speaks_for_each_replica(model: Lookup, silent: dict[str, Any]) -> None:
    batch = lookup.batch()
    model.layout = Layout(tp=2, pp=2)
    for name, value in silent.items():
        setattr(model, name, value)
    tokens, rows = role(model).per_token_and_row(batch, scalar_head)
    assert len(model.calls) == 1  # it takes part in the run
    assert tokens.shape == batch.token_ids.shape and not tokens.any() and not rows.any()


def test_ranks_without_the_model_get_what_the_others_say(model: Lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = lookup.batch()
    said = role(model).per_token_and_row(batch, scalar_head)
    model.calls.clear()
    merged: list[Tensor] = []

    def from_others(values: Tensor, *mask: Tensor) -> Tensor:
        assert not values.any()  # nothing of its own
        merged.append(values)
        return said[values.dim() == 1]

    monkeypatch.setattr(module, "merge_tokens", from_others)
    monkeypatch.setattr(module, "merge_rows", from_others)
    outside = role(None)
    assert torch.equal(outside.per_token(batch, scalar_head), said[0])
    assert torch.equal(outside.per_row(batch, scalar_head), said[1])
    both = outside.per_token_and_row(batch, scalar_head)
    assert torch.equal(both[0], said[0]) and torch.equal(both[1], said[1])
    shape = batch.token_ids.shape
    assert [values.shape for values in merged] == [shape, (6,), shape, (6,)] and model.calls == []


def test_weights_in_host_memory_are_on_the_device_while_the_model_runs(
    model: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Host:
        @contextmanager
        def resident(self) -> Iterator[None]:
            events.append("come")
            yield
            events.append("go")

    def forward(*args: Any) -> Any:
        events.append("run")
        return model.forward(*args)

    monkeypatch.setattr(module, "forward", forward)
    batch = lookup.batch()
    found = role(model, host_weights=Host()).per_row(batch, scalar_head)
    assert events == ["come", "run", "go"]
    assert torch.equal(found, expected(model, batch)[1])


def test_a_scalar_head_drops_the_last_dimension() -> None:
    part = Microbatch(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), [], [])
    (found,) = scalar_head(torch.tensor([[[1.0], [2.0], [3.0]]]), part)
    assert found.tolist() == [[1.0, 2.0, 3.0]]
