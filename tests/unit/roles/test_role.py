"""Test how rows reach the ranks of a role, and how results return to their owners.

Layouts of several ranks run as threads. tests/distributed runs processes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import ActorConfig, TrainerConfig
from rlhf_mcore.data.collate import RowTokens
from rlhf_mcore.mcore.model import scalar_outputs
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.observability.throughput import ModelFlops
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles import model as module
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.trained_model import minibatches
from rlhf_mcore.types import Microbatch, RowSizes, TrainBatch
from tests.rows import Row, padded_batch
from tests.rows import batch_of as make_batch
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.roles import lookup
from tests.unit.roles.lookup import Lookup

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def model() -> Lookup:
    return Lookup(width=1)


def role(model: Lookup | None, layout: ParallelLayout | None = None, **trainer: Any) -> RoleModel:
    which: Any = model
    layout = layout or (model.layout if model is not None else ParallelLayout(1))
    settings: dict[str, Any] = dict(max_tokens_per_microbatch=64) | trainer
    return RoleModel(layout, which, Lookup.spec, TrainerConfig(**settings))  # type: ignore[arg-type]


def rows_of(lengths: list[int]) -> list[Row]:
    """Build rows of these lengths, with a prompt of one token. The ids encode the row."""
    return [Row([row % 7], [(row + t) % 7 for t in range(1, n)], [0.0] * (n - 1)) for row, n in enumerate(lengths)]


def batch_of(lengths: list[int]) -> TrainBatch:
    """Build a batch with two rows per prompt."""
    return make_batch(rows_of(lengths), [k // 2 for k in range(len(lengths))])


def random_lengths(seed: int, num_rows: int = 24) -> list[int]:
    return torch.randint(2, 14, (num_rows,), generator=torch.Generator().manual_seed(seed)).tolist()


def shares(lengths: list[int], parts: list[list[int]], layout: ParallelLayout) -> list[list[RowTokens]]:
    """Return each rank's rows of each part. A field contains the number of each row."""

    def body(group: ThreadGroup) -> list[RowTokens]:
        batch = batch_of(lengths)
        numbers = batch.rows.repeat_interleave(batch.lengths[batch.rows]).float()
        held = Lookup(width=1, layout=layout) if group.rank() in layout.ranks else None
        which = role(held, layout)
        return which.deliver(batch, [which.deal(batch, part) for part in parts], {"number": numbers})

    return run_ranks(max(layout.ranks) + 1, body)


# -------------------------------------------------------------------------------------------------------------- sharing
@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("dp", [1, 2, 4, 5])
def test_every_row_of_every_minibatch_has_one_rank_and_comes_with_its_tokens(dp: int) -> None:
    lengths = random_lengths(0)
    parts = [[0, 1, 2, 3, 8, 9], [4, 5], [10, 11, 12, 13, 20, 21, 22, 23]]
    ranks = shares(lengths, parts, ParallelLayout(dp))
    for number, rows in enumerate(parts):
        held = [rank[number] for rank in ranks]
        assert sorted(row for share in held for row in share.rows) == rows
        for share in held:
            assert share.lengths == [lengths[row] for row in share.rows]
            found = share.fields["token_ids"].split(share.lengths)
            assert [ids.tolist() for ids in found] == [
                [(row + t) % 7 for t in range(lengths[row])] for row in share.rows
            ]
            owners = share.fields["number"].split(share.lengths)
            assert [set(part.tolist()) for part in owners] == [{float(row)} for row in share.rows]


@pytest.mark.usefixtures("rank_threads")
def test_ranks_of_a_replica_have_the_same_rows_and_ranks_outside_none() -> None:
    # Ranks 1 to 4 of five: tensor parallel two, data parallel two.
    ranks = shares(random_lengths(3), [list(range(24))], ParallelLayout(4, tp=2, first_rank=1))
    assert ranks[0] == []
    first, second, third, fourth = (rank[0] for rank in ranks[1:])
    assert first.rows == second.rows and third.rows == fourth.rows
    assert sorted(first.rows + third.rows) == list(range(24))
    for name, value in first.fields.items():
        assert torch.equal(value, second.fields[name])


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_get_nearly_equal_tokens_of_every_minibatch(dp: int, seed: int) -> None:
    lengths = random_lengths(seed)
    parts = [list(range(8)), list(range(8, 16)), list(range(16, 24))]
    ranks = shares(lengths, parts, ParallelLayout(dp))
    for number, rows in enumerate(parts):
        tokens = [sum(rank[number].lengths) for rank in ranks]
        longest = max(lengths[row] for row in rows)
        assert max(tokens) - min(tokens) <= longest
        assert max(tokens) <= sum(tokens) / dp + longest / 2


@pytest.mark.usefixtures("rank_threads")
def test_balance_by_hand() -> None:
    # Each of two ranks gets one row of each length.
    for (share,) in shares([9, 9, 5, 5, 3, 3], [list(range(6))], ParallelLayout(2)):
        assert sorted(share.lengths) == [3, 5, 9]


@pytest.mark.usefixtures("rank_threads")
def test_more_ranks_than_rows_leave_some_with_a_dummy(model: Lookup) -> None:
    held = [rank[0] for rank in shares([4, 4], [[0, 1]], ParallelLayout(3))]
    assert sorted(len(share.rows) for share in held) == [0, 1, 1]
    empty = next(share for share in held if not share.rows)
    (dummy,) = role(model).microbatches(empty)
    assert dummy.rows == [] and not dummy.fields["number"].any()


# ---------------------------------------------------------------------------------------------------------- minibatches
def test_minibatches_are_consecutive_prompts() -> None:
    groups = torch.arange(8).repeat_interleave(2)
    assert minibatches(groups, 3) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15]]
    assert minibatches(groups, 8) == minibatches(groups, 100) == [list(range(16))]
    assert minibatches(groups, 1) == [[k, k + 1] for k in range(0, 16, 2)]


# --------------------------------------------------------------------------------------------------------- microbatches
def some_rows(lengths: list[int]) -> RowTokens:
    return RowTokens(list(range(len(lengths))), lengths, {"token_ids": torch.ones(sum(lengths), dtype=torch.int32)})


@pytest.mark.parametrize("packing", [True, False])
def test_microbatches_suit_the_layout(model: Lookup, packing: bool) -> None:
    held = some_rows([2, 6, 8, 3, 5, 6])
    interleaved = ParallelLayout(12, tp=4, pp=3, vpp=2, sequence_parallel=True)
    parts = role(model, interleaved, max_tokens_per_microbatch=12, packing=packing).microbatches(held)
    assert len(parts) % 3 == 0  # an interleaved pipeline requires a multiple of its stages
    assert all(part.token_ids.size(1) % 4 == 0 for part in parts)  # sequence parallelism splits tokens over four ranks
    assert all(part.token_ids.numel() <= 12 for part in parts)
    assert sorted(row for part in parts for row in part.rows) == list(range(6))
    plain = role(model, ParallelLayout(12, tp=4, pp=3), max_tokens_per_microbatch=12, packing=packing)
    parts = plain.microbatches(some_rows([2, 3]))
    assert sum(part.token_ids.numel() for part in parts) >= 5
    assert sorted(row for part in parts for row in part.rows) == [0, 1]


def test_ranks_that_share_experts_run_equally_many_microbatches(model: Lookup, monkeypatch: pytest.MonkeyPatch) -> None:
    held, counts = some_rows([6, 6, 6, 6]), []

    def busier(values: dict[str, float], group: object) -> dict[str, float]:
        """Simulate another rank with five microbatches."""
        counts.append(values["count_max"])
        return {"count_max": 5.0}

    monkeypatch.setattr(module, "reduce_sums", busier)
    assert len(role(model, max_tokens_per_microbatch=12).microbatches(held)) == 2 and counts == []
    parts = role(model, ParallelLayout(2, ep=2), max_tokens_per_microbatch=12).microbatches(held)
    assert len(parts) == 5 and counts == [2.0]
    assert sorted(row for part in parts for row in part.rows) == [0, 1, 2, 3]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("forward_only", [False, True])
def test_tokens_of_products_in_8_bits_are_a_multiple_of_32_on_each_rank(
    model: Lookup, packing: bool, forward_only: bool
) -> None:
    model.overrides = Overrides.of("actor", ActorConfig(fp8="blockwise"))
    held = some_rows([2, 6, 8, 3, 5, 6])
    for layout, multiple in ((ParallelLayout(1), 32), (ParallelLayout(4, tp=4, sequence_parallel=True), 128)):
        placed = role(model, layout, max_tokens_per_microbatch=300, packing=packing)
        parts = placed.microbatches(held, forward_only=forward_only)
        assert all(part.token_ids.size(1) % multiple == 0 for part in parts)
        assert sorted(row for part in parts for row in part.rows) == list(range(6))


@pytest.mark.parametrize("forward_only", [False, True])
def test_all_passes_have_one_shape_where_communication_overlaps_computation(model: Lookup, forward_only: bool) -> None:
    model.overrides = Overrides(values={"tp_comm_overlap": True})
    placed = role(model, ParallelLayout(4, tp=4, sequence_parallel=True), max_tokens_per_microbatch=15)
    parts = placed.microbatches(some_rows([2, 6, 8, 3, 5, 6]), forward_only=forward_only)
    assert {tuple(part.token_ids.shape) for part in parts} == {(1, 12)}
    assert sorted(row for part in parts for row in part.rows) == list(range(6))


# -------------------------------------------------------------------------------------------------------------- results
def compute_expected(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return, row by row, the output one token earlier [N] and after the last token [B]."""
    outputs = Lookup(width=1).table.detach().squeeze(1).tolist()
    made = padded_batch(batch)
    tokens, rows = [], torch.zeros(batch.num_rows)
    for row, length in enumerate(batch.lengths.tolist()):
        ids, mask = made.token_ids[row].tolist(), made.loss_mask[row].tolist()
        rows[row] = outputs[ids[length - 1]]
        if row in batch.rows.tolist():
            tokens += [outputs[ids[t - 1]] if mask[t] else 0.0 for t in range(length)]
    return torch.tensor(tokens), rows


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("max_tokens", [8, 64])
def test_values_by_token_and_by_row(model: Lookup, packing: bool, max_tokens: int) -> None:
    batch = lookup.batch()
    tokens, rows = compute_expected(batch)
    which = role(model, packing=packing, max_tokens_per_microbatch=max_tokens)
    assert torch.equal(which.per_token(batch, scalar_outputs), tokens)
    assert torch.equal(which.per_row(batch, scalar_outputs), rows)
    model.calls.clear()
    both = which.per_token_and_row(batch, scalar_outputs)
    assert torch.equal(both[0], tokens) and torch.equal(both[1], rows)
    assert len(model.calls) == 1 and (len(model.calls[0][1]) > 1) == (max_tokens == 8)  # one run for both fields


LAYOUTS = {
    "dp2": (2, ParallelLayout(2)),
    "dp3": (3, ParallelLayout(3)),
    "more ranks than rows": (8, ParallelLayout(8)),
    "tp2 pp2": (4, ParallelLayout(4, tp=2, pp=2)),
    "a part of the world": (4, ParallelLayout(2, first_rank=1)),
}


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("owner", ["dealt", "first", "last"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_owner_gets_the_results_of_its_rows_whoever_that_is(model: Lookup, name: str, owner: str) -> None:
    world_size, layout = LAYOUTS[name]

    def body(group: ThreadGroup) -> bool:
        batch = lookup.batch(owner={"dealt": None, "first": 0, "last": world_size - 1}[owner])
        mine = None
        if group.rank() in layout.ranks:
            place = layout.coordinates(group.rank())
            mine = Lookup(width=1, layout=layout, tp_rank=place["tp"], is_last_stage=place["pp"] == layout.pp - 1)
        tokens, rows = role(mine, layout).per_token_and_row(batch, scalar_outputs)
        assert mine is None or len(mine.calls) == 1  # all ranks take part in the run
        return torch.equal(tokens, compute_expected(batch)[0]) and torch.equal(rows, compute_expected(batch)[1])

    assert run_ranks(world_size, body) == [True] * world_size


def test_outputs_of_a_scalar_head_lose_the_last_dimension() -> None:
    part = Microbatch(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64), [], [])
    found = scalar_outputs(torch.tensor([[[1.0], [2.0], [3.0]]]), part)
    assert found.tolist() == [[1.0, 2.0, 3.0]]


def test_rows_are_dealt_by_what_they_cost_attention_included() -> None:
    """A pair costs as much as a token.

    Rows of 8, 6 and 2 tokens cost 8 + 36, 6 + 21 and 2 + 3, so the longest equals the rest.
    """

    def shares(flops: ModelFlops | None) -> list[list[int]]:
        held = RoleModel(ParallelLayout(2), None, Lookup().spec, TrainerConfig(), flops)
        return held.balance(RowSizes(torch.tensor([8, 6, 2, 2, 2, 2]), torch.arange(6)), range(6))

    assert shares(ModelFlops(token=0.6, pair=1.0, logits=0.4)) == [[0], [1, 2, 3, 4, 5]]
    tokens = [8, 6, 2, 2, 2, 2]
    for flops in (None, ModelFlops(token=1000.0, pair=1.0, logits=0.0)):
        assert sorted(sum(tokens[row] for row in share) for share in shares(flops)) == [10, 12]


@pytest.mark.parametrize(("limit", "expected"), [(None, 2), (30, 1)])
def test_a_pass_without_gradients_has_twice_the_tokens_unless_said_otherwise(limit: int | None, expected: int) -> None:
    held = RowTokens([0, 1, 2], [7, 7, 7], {"token_ids": torch.zeros(21, dtype=torch.int32)})
    which: Any = Lookup()
    placed = RoleModel(
        which.layout, which, which.spec, TrainerConfig(max_tokens_per_microbatch=7, forward_tokens=limit)
    )
    assert len(placed.microbatches(held)) == 3
    assert len(placed.microbatches(held, forward_only=True)) == expected
