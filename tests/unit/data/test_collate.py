from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.collate import (
    RowTokens,
    last_positions,
    make_microbatches,
    one_later,
    restore_last,
    restore_tokens,
    sequence_ids,
    to_model_layout,
    to_token_layout,
)
from rlhf_mcore.types import Microbatch, Ragged
from tests.messages import expect_error

PAD = 9
# (prompt tokens, response tokens) of every row. A response may be empty.
SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=0, max_size=9)


def rows_of(shapes: list[tuple[int, int]], rows: list[int] | None = None) -> RowTokens:
    """Build rows whose token ids and logprobs encode their position: row r, token t is 100 * (r + 1) + t."""
    numbers = list(range(len(shapes))) if rows is None else rows
    ids = [[100 * (row + 1) + t for t in range(sum(shapes[row]))] for row in numbers]
    mask = [[t >= shapes[row][0] for t in range(sum(shapes[row]))] for row in numbers]
    flat_ids = torch.tensor([i for part in ids for i in part], dtype=torch.int32)
    flat_mask = torch.tensor([m for part in mask for m in part], dtype=torch.bool)
    logprobs = torch.where(flat_mask, -flat_ids.float(), 0.0)
    fields = {"token_ids": flat_ids, "mask": flat_mask, "rollout_logprobs": logprobs}
    return RowTokens(numbers, [len(part) for part in ids], fields)


def tokens(ids: list[list[int]], logprobs: list[list[float]]) -> RowTokens:
    """Build rows by hand. A token with a logprob is trainable."""
    flat = torch.tensor([value for row in logprobs for value in row])
    fields = {"token_ids": torch.tensor([i for row in ids for i in row], dtype=torch.int32), "mask": flat != 0}
    return RowTokens(list(range(len(ids))), [len(row) for row in ids], {**fields, "rollout_logprobs": flat})


def microbatches_of(held: RowTokens, packing: bool, **settings: object) -> list[Microbatch]:
    options = {"max_tokens": 16, "pad_token_id": PAD, **settings}
    return make_microbatches(held, packing=packing, **options)  # type: ignore[arg-type]


def test_there_may_be_no_rows() -> None:
    for packing in (True, False):
        (dummy,) = microbatches_of(rows_of([]), packing)
        assert dummy.token_ids.tolist() == [[PAD]] and dummy.token_ids.dtype == torch.int64 and dummy.rows == []
        assert restore_tokens([torch.ones(1, 1)], [dummy], []).shape == (0,)
        assert restore_last([torch.ones(1, 1)], [dummy], 0).shape == (0,)


def test_the_shift_by_hand() -> None:
    values = torch.tensor([10.0, 11.0, 12.0, 13.0, 20.0, 21.0])
    model = to_model_layout(values, [4, 2])
    assert model.tolist() == [11, 12, 13, 0, 21, 0]
    assert to_token_layout(model, [4, 2]).tolist() == [0, 11, 12, 13, 0, 21]


def test_a_packed_microbatch_by_hand() -> None:
    (micro,) = microbatches_of(tokens([[1, 2, 3], [4, 5, 6]], [[0, 0, -3], [0, -5, -6]]), packing=True, pad_multiple=4)
    assert micro.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, PAD, PAD]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert micro.cu_seqlens is not None and micro.cu_seqlens.dtype == torch.int32
    assert micro.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert (micro.rows, micro.lengths, micro.max_seqlen) == ([0, 1], [3, 3], 3)
    assert micro.fields["labels"].tolist() == [[2, 3, 0, 5, 6, 0, 0, 0]] and micro.fields["labels"].dtype == torch.int64
    assert micro.fields["mask"].tolist() == [[False, True, False, True, True, False, False, False]]
    assert micro.fields["rollout_logprobs"].tolist() == [[0, -3, 0, -5, -6, 0, 0, 0]]


def test_sequences_of_a_packed_microbatch_are_padded_one_by_one_for_context_parallelism() -> None:
    held = tokens([[1, 2, 3], [4, 5, 6, 7]], [[0, 0, -3], [0, -5, -6, -7]])
    (micro,) = microbatches_of(held, packing=True, sequence_multiple=4, pad_multiple=12)
    assert micro.token_ids.tolist() == [[1, 2, 3, PAD, 4, 5, 6, 7, *[PAD] * 4]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3] * 3]
    assert micro.cu_seqlens is not None and micro.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert (micro.rows, micro.lengths, micro.max_seqlen) == ([0, 1], [3, 4], 4)
    assert micro.fields["labels"].tolist() == [[2, 3, 0, 0, 5, 6, 7, 0, 0, 0, 0, 0]]
    assert micro.fields["mask"].tolist() == [[False, True, *[False] * 2, True, True, True, *[False] * 5]]
    assert last_positions(micro).tolist() == [2, 7]


def test_a_padded_microbatch_by_hand() -> None:
    (micro,) = microbatches_of(tokens([[1, 2, 3], [4, 5]], [[0, 0, -3], [0, -5]]), packing=False, pad_multiple=4)
    assert micro.token_ids.tolist() == [[1, 2, 3, PAD], [4, 5, PAD, PAD]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert micro.cu_seqlens is None
    assert (micro.rows, micro.lengths, micro.max_seqlen) == ([0, 1], [3, 2], 4)
    assert micro.fields["labels"].tolist() == [[2, 3, 0, 0], [5, 0, 0, 0]]
    assert micro.fields["mask"].tolist() == [[False, True, False, False], [True, False, False, False]]
    assert micro.fields["rollout_logprobs"].tolist() == [[0, -3, 0, 0], [-5, 0, 0, 0]]


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]), st.integers(1, 4), st.integers(1, 3))
def test_microbatches_hold_every_token_once_in_budget(
    shapes: list[tuple[int, int]], packing: bool, pad_multiple: int, min_count: int, multiple_of: int
) -> None:
    batch = rows_of(shapes)
    options = {"pad_multiple": pad_multiple, "min_count": min_count, "multiple_of": multiple_of}
    microbatches = microbatches_of(batch, packing, **options)
    assert len(microbatches) >= min_count and len(microbatches) % multiple_of == 0
    assert sorted(row for micro in microbatches for row in micro.rows) == list(range(len(shapes)))
    ids = torch.cat([micro.token_ids.flatten() for micro in microbatches])
    expected = [100 * (row + 1) + t for row, shape in enumerate(shapes) for t in range(sum(shape))]
    assert sorted(ids[ids != PAD].tolist()) == expected
    for micro in microbatches:
        assert micro.token_ids.numel() <= 16 and micro.token_ids.shape[1] % pad_multiple == 0
        assert {field.shape for field in micro.fields.values()} == {micro.token_ids.shape}
        assert micro.rows or not any(field.any() for field in micro.fields.values())
    masked = sum(int(micro.fields["mask"].sum()) for micro in microbatches)
    assert masked == sum(response for _, response in shapes)


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]), st.integers(1, 4))
def test_a_field_comes_back_where_it_was(
    shapes: list[tuple[int, int]], packing: bool, pad_multiple: int, min_count: int
) -> None:
    batch = rows_of(shapes)
    microbatches = microbatches_of(batch, packing, pad_multiple=pad_multiple, min_count=min_count)
    outputs = [micro.fields["rollout_logprobs"] for micro in microbatches]
    restored = restore_tokens(outputs, microbatches, batch.lengths)
    assert torch.equal(restored, batch.fields["rollout_logprobs"])


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]))
def test_an_output_about_the_next_token_comes_back_at_that_token(
    shapes: list[tuple[int, int]], packing: bool, pad_multiple: int
) -> None:
    """The model outputs the next token of its row, id + 1, at every position including padding."""
    batch = rows_of(shapes)
    microbatches = microbatches_of(batch, packing, pad_multiple=pad_multiple)
    outputs = [(micro.token_ids + 1).to(torch.float64) for micro in microbatches]
    restored = restore_tokens(outputs, microbatches, batch.lengths)
    assert restored.dtype == torch.float32
    for found, ids in zip(restored.split(batch.lengths), batch.fields["token_ids"].split(batch.lengths), strict=True):
        assert found[1:].tolist() == ids[1:].tolist() and found[0] == 0


@pytest.mark.parametrize("packing", [True, False])
def test_microbatches_point_at_places_among_the_rows_of_this_rank(packing: bool) -> None:
    held = rows_of([(2, 2), (1, 3), (2, 1)], rows=[2, 0])
    (micro,) = microbatches_of(held, packing)
    assert sorted(zip(micro.rows, micro.lengths, strict=True)) == [(0, 3), (1, 4)]
    outputs = [micro.fields["rollout_logprobs"].requires_grad_()]
    restored, last = restore_tokens(outputs, [micro], held.lengths), restore_last(outputs, [micro], 2)
    assert torch.equal(restored, held.fields["rollout_logprobs"])
    assert not restored.requires_grad and not last.requires_grad


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4]), st.integers(1, 3), st.integers(1, 2))
def test_units_of_rows_stay_together_in_budget(
    shapes: list[tuple[int, int]], packing: bool, pad_multiple: int, rows_per_unit: int, multiple_of: int
) -> None:
    batch = rows_of(shapes[: len(shapes) // rows_per_unit * rows_per_unit])
    options = {"rows_per_unit": rows_per_unit, "max_tokens": 48, "multiple_of": multiple_of}
    microbatches = microbatches_of(batch, packing, pad_multiple=pad_multiple, **options)
    held = [row for micro in microbatches for row in micro.rows]
    starts = sorted(held[::rows_per_unit])
    assert starts == list(range(0, len(batch.rows), rows_per_unit))
    for micro in microbatches:
        assert micro.token_ids.numel() <= 48 and len(micro.rows) % rows_per_unit == 0
        for place in range(0, len(micro.rows), rows_per_unit):
            first = micro.rows[place]
            assert micro.rows[place : place + rows_per_unit] == list(range(first, first + rows_per_unit))


@pytest.mark.parametrize("packing", [True, False])
def test_a_unit_that_does_not_fit_a_microbatch_is_refused(packing: bool) -> None:
    batch = rows_of([(2, 2), (3, 1)])
    assert len(microbatches_of(batch, packing, max_tokens=8, rows_per_unit=2)) == 1
    with expect_error(ConfigError, field="trainer.max_tokens_per_microbatch", value=7):
        microbatches_of(batch, packing, max_tokens=7, rows_per_unit=2)


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]))
def test_the_last_token_of_every_row_is_found(shapes: list[tuple[int, int]], packing: bool, pad_multiple: int) -> None:
    found = {}
    for micro in microbatches_of(rows_of(shapes), packing, pad_multiple=pad_multiple):
        found |= zip(micro.rows, micro.token_ids.flatten()[last_positions(micro)].tolist(), strict=True)
    assert found == {row: 100 * (row + 1) + sum(shape) - 1 for row, shape in enumerate(shapes)}


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]), st.integers(1, 4))
def test_the_output_at_the_last_token_of_every_row_is_found(
    shapes: list[tuple[int, int]], packing: bool, pad_multiple: int, min_count: int
) -> None:
    batch = rows_of(shapes)
    microbatches = microbatches_of(batch, packing, pad_multiple=pad_multiple, min_count=min_count)
    outputs = [(2 * micro.token_ids).to(torch.float64) for micro in microbatches]  # padding produces outputs too
    last = restore_last(outputs, microbatches, len(shapes))
    assert last.dtype == torch.float32
    assert last.tolist() == [2 * (100 * (row + 1) + sum(shape) - 1) for row, shape in enumerate(shapes)]


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]))
def test_tokens_know_their_sequence(shapes: list[tuple[int, int]], packing: bool, pad_multiple: int) -> None:
    for micro in microbatches_of(rows_of(shapes), packing, pad_multiple=pad_multiple):
        ids, count = sequence_ids(micro)
        assert ids.shape == micro.token_ids.shape and ids.dtype == torch.int64
        assert int(ids.max()) < count and int(ids.min()) == 0
        real = micro.token_ids != PAD
        # Token ids encode their row: 100 * (row + 1) + position.
        rows = [micro.rows[k] for k in ids[real].tolist()]
        assert rows == (micro.token_ids[real] // 100 - 1).tolist()


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_that_does_not_fit_a_microbatch_is_refused(packing: bool) -> None:
    batch = rows_of([(2, 2), (3, 4)])
    with expect_error(ConfigError, field="trainer.max_tokens_per_microbatch"):
        microbatches_of(batch, packing, max_tokens=6)
    with expect_error(ConfigError, field="trainer.max_tokens_per_microbatch", value=7):
        microbatches_of(batch, packing, max_tokens=7, pad_multiple=4)
    assert len(microbatches_of(batch, packing, max_tokens=8, pad_multiple=4)) == 2


def test_each_position_gets_the_next_value_of_its_own_sequence_by_hand() -> None:
    (packed,) = microbatches_of(rows_of([(2, 1), (1, 1)]), packing=True)
    values = torch.arange(10.0, 10.0 + packed.token_ids.numel())[None]
    assert one_later(values, packed)[0, :5].tolist() == [11, 12, 0, 14, 0]
    (padded,) = microbatches_of(rows_of([(2, 1), (2, 1)]), packing=False)
    values = torch.arange(1.0, 1.0 + padded.token_ids.numel()).view_as(padded.token_ids)
    expected = [[*row[1:], 0] for row in values.tolist()]
    assert one_later(values, padded).tolist() == expected


@pytest.mark.parametrize("packing", [True, False])
def test_values_of_tokens_stay_with_their_rows(packing: bool) -> None:
    held = tokens([[11, 12, 13], [21, 22]], [[0.0, -1.0, -2.0], [0.0, -3.0]])
    # Two values at token 12, one at 13, three at 22. First tokens have none, because they were not sampled.
    counts, values = torch.tensor([0, 2, 1, 0, 3], dtype=torch.int32), torch.tensor([5, 6, 7, 1, 2, 3])
    held = RowTokens(held.rows, held.lengths, held.fields, {"support": Ragged(counts, values)})
    by_row = {0: ([2, 1, 0], [5, 6, 7]), 1: ([3, 0], [1, 2, 3])}  # counts in the model's layout, one token earlier
    (microbatch,) = microbatches_of(held, packing, max_tokens=16)
    support = microbatch.ragged["support"]
    assert support.values.tolist() == [value for row in microbatch.rows for value in by_row[row][1]]
    if packing:
        assert support.counts.flatten().tolist() == [count for row in microbatch.rows for count in by_row[row][0]]
    else:
        assert support.counts.tolist() == [
            [*by_row[row][0], *[0] * (3 - len(by_row[row][0]))] for row in microbatch.rows
        ]


def test_microbatches_have_the_images_of_their_sequences_in_order() -> None:
    """Row 1 has two sequences with separate images. Row 3 has two sequences without images."""
    fields = {"token_ids": torch.arange(1, 15, dtype=torch.int32)}
    images = [("a",), ("b", "c"), ("d",), (), (), ()]
    tokens = RowTokens([4, 7, 9, 10], [2, 6, 2, 4], fields, sequences=[[2], [3, 3], [2], [2, 2]], images=images)
    microbatches = make_microbatches(tokens, max_tokens=4, packing=True)
    found = {place: own for m in microbatches for place, own in zip(m.rows, m.images, strict=True)}
    assert found == {0: ("a",), 1: ("b", "c"), 2: ("d",), 3: (), 4: (), 5: ()}
    plain = make_microbatches(RowTokens([0], [2], {"token_ids": torch.tensor([1, 2])}), max_tokens=4, packing=True)
    assert plain[0].images == []
