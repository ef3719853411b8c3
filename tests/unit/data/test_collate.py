from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.collate import (
    Row,
    last_positions,
    make_microbatches,
    make_train_batch,
    restore_last,
    restore_rows,
    sequence_ids,
    to_model_layout,
    to_token_layout,
)
from rlhf_mcore.types import Microbatch, TrainBatch

PAD = 9
# (prompt tokens, response tokens) of every row; a response may be empty.
SHAPES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=0, max_size=9)


def batch_of(shapes: list[tuple[int, int]]) -> TrainBatch:
    """Rows whose token ids and logprobs say where they are: row r, token t is 100 * (r + 1) + t."""
    records = []
    for row, (prompt, response) in enumerate(shapes):
        ids = [100 * (row + 1) + t for t in range(prompt + response)]
        records.append(Row(ids[:prompt], ids[prompt:], [-float(i) for i in ids[prompt:]], float(row)))
    return make_train_batch(records, list(range(len(shapes))), PAD)


def microbatches_of(batch: TrainBatch, packing: bool, **settings: object) -> list[Microbatch]:
    options = {
        "fields": {"rollout_logprobs": batch.rollout_logprobs},
        "max_tokens": 16,
        "pad_token_id": PAD,
        **settings,
    }
    rows = list(range(len(batch.token_ids)))
    return make_microbatches(batch, rows, packing=packing, **options)  # type: ignore[arg-type]


def test_a_train_batch_is_prompt_then_response_then_padding() -> None:
    records = [Row([1, 2], [3], [-0.5], 1.0), Row([4], [5, 6, 7], [-1.0, -2.0, -3.0], 0.1, truncated=True)]
    batch = make_train_batch(records, [2, 1], PAD)
    assert batch.token_ids.tolist() == [[1, 2, 3, PAD], [4, 5, 6, 7]]
    assert batch.lengths.tolist() == [3, 4]
    assert batch.loss_mask.tolist() == [[False, False, True, False], [False, True, True, True]]
    assert batch.rollout_logprobs.tolist() == [[0, 0, -0.5, 0], [0, -1, -2, -3]]
    assert batch.scores.tolist() == [1.0, 0.1]  # 0.1 exactly: double precision
    assert batch.truncated.tolist() == [False, True] and batch.group_ids.tolist() == [2, 1]
    integers, booleans = (batch.token_ids, batch.lengths, batch.group_ids), (batch.loss_mask, batch.truncated)
    assert {x.dtype for x in integers} == {torch.int64} and {x.dtype for x in booleans} == {torch.bool}
    assert (batch.rollout_logprobs.dtype, batch.scores.dtype) == (torch.float32, torch.float64)


def test_a_batch_may_have_no_rows() -> None:
    batch = make_train_batch([], [], PAD)
    assert batch.token_ids.shape == (0, 1)
    assert batch.scores.shape == (0,) and batch.group_ids.dtype == torch.int64
    for packing in (True, False):
        (dummy,) = make_microbatches(batch, [], fields={}, max_tokens=8, packing=packing, pad_token_id=PAD)
        assert dummy.token_ids.tolist() == [[PAD]] and dummy.rows == []
        assert restore_rows([torch.ones(1, 1)], [dummy], 0, 1).shape == (0, 1)
        assert restore_last([torch.ones(1, 1)], [dummy], 0).shape == (0,)


def test_rows_that_an_engine_must_not_give_are_refused() -> None:
    good = Row([1], [2], [-1.0], 0.0)
    with pytest.raises(ValueError, match="row 1: the engine gave 1 logprobs for 2 response tokens"):
        make_train_batch([good, Row([1], [2, 3], [-1.0], 0.0)], [0, 1], PAD)
    with pytest.raises(ValueError, match="row 0: the prompt has no tokens"):
        make_train_batch([Row([], [2], [-1.0], 0.0), good], [0, 1], PAD)


def test_the_shift_by_hand() -> None:
    values = torch.tensor([[10.0, 11.0, 12.0, 13.0], [20.0, 21.0, 99.0, 99.0]])
    lengths = torch.tensor([4, 2])
    model = to_model_layout(values, lengths)
    assert model.tolist() == [[11, 12, 13, 0], [21, 0, 0, 0]]
    assert to_token_layout(model, lengths).tolist() == [[0, 11, 12, 13], [0, 21, 0, 0]]


def test_a_packed_microbatch_by_hand() -> None:
    records = [Row([1, 2], [3], [-3.0], 0.0), Row([4], [5, 6], [-5.0, -6.0], 0.0)]
    batch = make_train_batch(records, [0, 0], PAD)
    (micro,) = microbatches_of(batch, packing=True, pad_multiple=4)
    assert micro.token_ids.tolist() == [[1, 2, 3, 4, 5, 6, PAD, PAD]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert micro.cu_seqlens is not None and micro.cu_seqlens.dtype == torch.int32
    assert micro.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert (micro.rows, micro.lengths, micro.max_seqlen) == ([0, 1], [3, 3], 3)
    assert micro.fields["labels"].tolist() == [[2, 3, 0, 5, 6, 0, 0, 0]]
    assert micro.fields["mask"].tolist() == [[False, True, False, True, True, False, False, False]]
    assert micro.fields["rollout_logprobs"].tolist() == [[0, -3, 0, -5, -6, 0, 0, 0]]


def test_a_padded_microbatch_by_hand() -> None:
    records = [Row([1, 2], [3], [-3.0], 0.0), Row([4], [5], [-5.0], 0.0)]
    batch = make_train_batch(records, [0, 0], PAD)
    (micro,) = microbatches_of(batch, packing=False, pad_multiple=4)
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
    batch = batch_of(shapes)
    options = {"pad_multiple": pad_multiple, "min_count": min_count, "multiple_of": multiple_of}
    microbatches = microbatches_of(batch, packing, **options)
    assert len(microbatches) >= min_count and len(microbatches) % multiple_of == 0
    assert sorted(row for micro in microbatches for row in micro.rows) == list(range(len(shapes)))
    tokens = torch.cat([micro.token_ids.flatten() for micro in microbatches])
    expected = [100 * (row + 1) + t for row, shape in enumerate(shapes) for t in range(sum(shape))]
    assert sorted(tokens[tokens != PAD].tolist()) == expected
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
    batch = batch_of(shapes)
    microbatches = microbatches_of(batch, packing, pad_multiple=pad_multiple, min_count=min_count)
    outputs = [micro.fields["rollout_logprobs"] for micro in microbatches]
    restored = restore_rows(outputs, microbatches, *batch.token_ids.shape)
    assert torch.equal(restored, batch.rollout_logprobs)


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]))
def test_what_a_model_says_of_the_next_token_lands_on_that_token(
    shapes: list[tuple[int, int]], packing: bool, pad_multiple: int
) -> None:
    """A model that answers everywhere, padding included, with the next token in its row: id + 1."""
    batch = batch_of(shapes)
    microbatches = microbatches_of(batch, packing, pad_multiple=pad_multiple)
    outputs = [(micro.token_ids + 1).to(torch.float64) for micro in microbatches]
    restored = restore_rows(outputs, microbatches, *batch.token_ids.shape)
    assert restored.dtype == torch.float32
    for row, shape in enumerate(shapes):
        length = sum(shape)
        assert restored[row, 1:length].tolist() == batch.token_ids[row, 1:length].tolist()
        assert restored[row, 0] == 0 and not restored[row, length:].any()


@pytest.mark.parametrize("packing", [True, False])
def test_rows_that_are_not_asked_for_stay_zero(packing: bool) -> None:
    batch = batch_of([(2, 2), (1, 3), (2, 1)])
    fields = {"rollout_logprobs": batch.rollout_logprobs}
    microbatches = make_microbatches(batch, [2, 0], fields=fields, max_tokens=16, packing=packing)
    outputs = [micro.fields["rollout_logprobs"].requires_grad_() for micro in microbatches]
    restored = restore_rows(outputs, microbatches, 3, 6)
    assert restored.shape == (3, 6) and not restored.requires_grad
    assert torch.equal(restored[[0, 2], :4], batch.rollout_logprobs[[0, 2]])
    assert not restored[1].any()


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4]), st.integers(1, 3), st.integers(1, 2))
def test_units_of_rows_stay_together_in_budget(
    shapes: list[tuple[int, int]], packing: bool, pad_multiple: int, rows_per_unit: int, multiple_of: int
) -> None:
    batch = batch_of(shapes[: len(shapes) // rows_per_unit * rows_per_unit])
    options = {"rows_per_unit": rows_per_unit, "max_tokens": 48, "multiple_of": multiple_of}
    microbatches = microbatches_of(batch, packing, pad_multiple=pad_multiple, **options)
    held = [row for micro in microbatches for row in micro.rows]
    starts = sorted(held[::rows_per_unit])
    assert starts == list(range(0, len(batch.lengths), rows_per_unit))
    for micro in microbatches:
        assert micro.token_ids.numel() <= 48 and len(micro.rows) % rows_per_unit == 0
        for place in range(0, len(micro.rows), rows_per_unit):
            first = micro.rows[place]
            assert micro.rows[place : place + rows_per_unit] == list(range(first, first + rows_per_unit))


@pytest.mark.parametrize("packing", [True, False])
def test_a_unit_that_does_not_fit_a_microbatch_is_refused(packing: bool) -> None:
    batch = batch_of([(2, 2), (3, 1)])
    assert len(microbatches_of(batch, packing, max_tokens=8, rows_per_unit=2)) == 1
    with pytest.raises(ConfigError, match=r"trainer.max_tokens_per_microbatch=7"):
        microbatches_of(batch, packing, max_tokens=7, rows_per_unit=2)


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]))
def test_the_last_token_of_every_row_is_found(shapes: list[tuple[int, int]], packing: bool, pad_multiple: int) -> None:
    found = {}
    for micro in microbatches_of(batch_of(shapes), packing, pad_multiple=pad_multiple):
        found |= zip(micro.rows, micro.token_ids.flatten()[last_positions(micro)].tolist(), strict=True)
    assert found == {row: 100 * (row + 1) + sum(shape) - 1 for row, shape in enumerate(shapes)}


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]), st.integers(1, 4))
def test_the_word_at_the_last_token_of_every_row_is_found(
    shapes: list[tuple[int, int]], packing: bool, pad_multiple: int, min_count: int
) -> None:
    batch = batch_of(shapes)
    microbatches = microbatches_of(batch, packing, pad_multiple=pad_multiple, min_count=min_count)
    outputs = [(2 * micro.token_ids).to(torch.float64) for micro in microbatches]  # padding says something too
    last = restore_last(outputs, microbatches, len(shapes))
    assert last.dtype == torch.float32
    assert last.tolist() == [2 * (100 * (row + 1) + sum(shape) - 1) for row, shape in enumerate(shapes)]


@pytest.mark.parametrize("packing", [True, False])
def test_rows_of_other_ranks_have_no_last_word_here(packing: bool) -> None:
    batch = batch_of([(2, 2), (1, 3), (2, 1)])
    microbatches = make_microbatches(batch, [2, 0], fields={}, max_tokens=16, packing=packing)
    outputs = [micro.token_ids.float().requires_grad_() for micro in microbatches]
    last = restore_last(outputs, microbatches, 3)
    assert last.tolist() == [103.0, 0.0, 302.0] and not last.requires_grad
    assert restore_last([], [], 3).tolist() == [0.0, 0.0, 0.0]


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.sampled_from([1, 4, 8]))
def test_tokens_know_their_sequence(shapes: list[tuple[int, int]], packing: bool, pad_multiple: int) -> None:
    for micro in microbatches_of(batch_of(shapes), packing, pad_multiple=pad_multiple):
        ids, count = sequence_ids(micro)
        assert ids.shape == micro.token_ids.shape and ids.dtype == torch.int64
        assert int(ids.max()) < count and int(ids.min()) == 0
        real = micro.token_ids != PAD
        # Token ids say their row: 100 * (row + 1) + position.
        rows = [micro.rows[k] for k in ids[real].tolist()]
        assert rows == (micro.token_ids[real] // 100 - 1).tolist()


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_that_does_not_fit_a_microbatch_is_refused(packing: bool) -> None:
    batch = batch_of([(2, 2), (3, 4)])
    with pytest.raises(ConfigError, match=r"trainer.max_tokens_per_microbatch"):
        microbatches_of(batch, packing, max_tokens=6)
    with pytest.raises(ConfigError, match=r"trainer.max_tokens_per_microbatch=7"):
        microbatches_of(batch, packing, max_tokens=7, pad_multiple=4)
    assert len(microbatches_of(batch, packing, max_tokens=8, pad_multiple=4)) == 2
