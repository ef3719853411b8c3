"""Stages of a pipeline know the shape of every message that they receive: by Megatron's own schedule, for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from rlhf_mcore.mcore.groups import StageMessages
from rlhf_mcore.parallel.layout import ParallelLayout

HIDDEN = 6


def messages(layout: ParallelLayout, rank: int, lengths: list[int], together: int) -> Any:
    config = SimpleNamespace(
        sequence_parallel=layout.sequence_parallel, hidden_size=HIDDEN, microbatch_group_size_per_vp_stage=together
    )
    microbatches = [SimpleNamespace(token_ids=torch.zeros(2, length), width=length) for length in lengths]
    groups = SimpleNamespace(collection=SimpleNamespace(pp=None), layout=layout, pp_rank=rank)
    return StageMessages(groups, config, microbatches)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(P2PCommunicator, "__init__", lambda *_, **__: None)


def order_sends(layout: ParallelLayout, rank: int, count: int, together: int, *, forward: bool) -> Iterator[int]:
    """Microbatches in whose order a stage sends to the one behind (``forward``) or before, as Megatron's table has them."""
    chunks = layout.vpp or 1
    at_end = rank == (layout.pp - 1 if forward else 0)
    for microbatch, chunk in get_schedule_table(count, chunks, together):
        if not (at_end and chunk == chunks - 1):  # the backward passes go from the last chunk to the first
            yield microbatch


@pytest.mark.parametrize(
    ("pp", "vpp", "count", "together"),
    [(2, None, 5, 2), (4, None, 3, 4), (2, 2, 4, 2), (2, 3, 6, 2), (4, 2, 8, 4), (2, 2, 5, 3)],
)
def test_shapes_come_in_the_order_of_messages(pp: int, vpp: int | None, count: int, together: int) -> None:
    layout = ParallelLayout(pp, pp=pp, vpp=vpp)
    lengths = [8 + 4 * number for number in range(count)]
    for rank in range(pp):
        mine = messages(layout, rank, lengths, together)
        for number in order_sends(layout, (rank - 1) % pp, count, together, forward=True):
            assert mine._communicate_shapes(None, None, True, False) == ((lengths[number], 2, HIDDEN), None)
        for number in order_sends(layout, (rank + 1) % pp, count, together, forward=False):
            assert mine._communicate_shapes(None, None, False, True) == (None, (lengths[number], 2, HIDDEN))
        assert list(mine._forward) == list(mine._backward) == []


def test_both_directions_are_counted_apart() -> None:
    mine = messages(ParallelLayout(3, pp=3), 1, [8, 12], 3)
    assert mine._communicate_shapes(None, None, True, False) == ((8, 2, HIDDEN), None)
    assert mine._communicate_shapes(None, None, True, True) == ((12, 2, HIDDEN), (8, 2, HIDDEN))
    assert mine._communicate_shapes(None, None, False, False) == (None, None)
    assert mine._communicate_shapes(None, None, False, True) == (None, (12, 2, HIDDEN))


@pytest.mark.parametrize(("sequence_parallel", "tokens"), [(True, 6), (False, 12)])
def test_a_rank_has_its_part_of_the_tokens(sequence_parallel: bool, tokens: int) -> None:
    layout = ParallelLayout(8, tp=2, cp=2, pp=2, sequence_parallel=sequence_parallel)
    assert messages(layout, 1, [24], 2)._communicate_shapes(None, None, True, False)[0] == (tokens, 2, HIDDEN)
