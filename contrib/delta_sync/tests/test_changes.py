"""Unchanged elements are not sent. Four ranks are threads; receivers can or cannot read back the tensors that they have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.run.endpoints import HostCopies, LiveSources
from rlhf_mcore.bridge.run.execute import Executor
from rlhf_mcore_contrib.delta_sync.changes import Changes, decode, encode
from tests.unit.bridge.test_execute import (
    CASES,
    DTYPES,
    SHAPES,
    KeptBuffers,
    Wire,
    destination_places,
    make_plan,
    random_model,
    source_places,
    spread,
    tensors_of,
)
from tests.unit.pairs import each_value


@pytest.mark.parametrize(
    ("size", "changed", "nbytes"),
    [
        (1000, [], 0),
        (1000, [0], 3),  # a word of two bytes, and the number of words before it
        (1000, [999], 4 * 3),  # three words before it, 256 apart, are sent too
        (1000, [255], 3),
        (1000, [256], 2 * 3),
        (1000, [5, 6, 262, 519], 5 * 3),
        (6, [0, 1, 2, 3], None),  # 12 bytes are not shorter than 12
        (6, [0, 1, 2], 9),
    ],
)
def test_a_changed_word_costs_one_byte_more_than_itself(size: int, changed: list[int], nbytes: int | None) -> None:
    old = torch.arange(size, dtype=torch.int16)
    new = old.clone()
    new[changed] ^= 1 << 15  # the sign bit, because 0.0 and -0.0 are equal numbers with different bits
    encoded = encode(new.view(torch.uint8), old.view(torch.uint8), 2)
    assert (None if encoded is None else len(encoded)) == nbytes
    if encoded is not None:
        decode(encoded, old.view(torch.uint8), 2)
        assert torch.equal(old, new)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0005, 0.01, 0.2])
def test_changes_are_made_bit_for_bit(itemsize: int, share: float) -> None:
    generator = torch.Generator().manual_seed(itemsize)
    old = torch.randint(0, 256, (8 * 5000,), dtype=torch.uint8, generator=generator)
    new = old.clone().view(-1, itemsize)
    where = torch.rand(len(new), generator=generator) < share
    new[where] ^= 1
    encoded = encode(new.view(-1), old, itemsize)
    assert encoded is not None and len(encoded) >= int(where.sum()) * (1 + itemsize)
    decode(encoded, old, itemsize)
    assert torch.equal(old, new.view(-1))


@dataclass(slots=True)
class Readable(KeptBuffers):
    """Destinations whose tensors can be read again."""

    def written(self) -> Mapping[str, Tensor]:
        return self.flats


def few_changes(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    changed = {name: tensor.clone() for name, tensor in model.items()}
    for tensor in changed.values():
        tensor.view(-1)[-1] += 1
    return changed


@each_value(
    ("kind", [Readable, KeptBuffers]),
    ("tp, pp, parts, per_node", list(CASES)),
)
def test_every_run_brings_what_the_sources_hold_then(
    tp: int, pp: int, parts: int, per_node: int | None, kind: type[KeptBuffers]
) -> None:
    wire, full_every = Wire(1), 3
    sources, destinations = (
        source_places(tp, pp),
        destination_places(parts, buffers=len(SHAPES)),
    )  # each buffer in the dtype of its tensor
    plan = make_plan(sources, destinations, per_node)
    versions = [random_model(0)]
    while len(versions) < 5:
        versions.append(few_changes(versions[-1]))

    def rank_body(rank: int) -> None:
        mine, received = tensors_of(sources, rank), kind(tensors_of(destinations, rank))
        previous = HostCopies(mine)
        changes = Changes(wire, previous, full_every, torch.device("cpu"))
        executor = Executor(plan.rank_view(rank), LiveSources(mine), DTYPES, wire, changes=changes)
        for number, version in enumerate(versions):
            spread(mine, sources, rank, version)
            executor.run(received, is_full=False)
            previous.take()
            expected = tensors_of(destinations, rank)
            spread(expected, destinations, rank, version)
            assert all(torch.equal(received.flats[name], tensor) for name, tensor in expected.items())
            assert changes.is_full is (number in (0, 3)) and changes.num_wrong == 0
            moved = changes.moved
            assert not changes.is_full or (moved.sent, moved.received) == (moved.planned_sent, moved.planned_received)
            assert moved.received <= moved.planned_received

    wire.run(rank_body)


@pytest.mark.parametrize("kind", [Readable, KeptBuffers])
def test_a_receiver_that_has_lost_an_element_is_noticed(kind: type[KeptBuffers]) -> None:
    """The lost element is noticed by a receiver that reads its tensors. A receiver with its own copies is not affected."""
    wire, sources, destinations = Wire(0), source_places(2, 2), destination_places(1, buffers=len(SHAPES))
    plan = make_plan(sources, destinations, None)
    wrong = dict[int, int]()

    def rank_body(rank: int) -> None:
        mine, received = tensors_of(sources, rank), kind(tensors_of(destinations, rank))
        previous = HostCopies(mine)
        changes = Changes(wire, previous, 100, torch.device("cpu"))
        executor = Executor(plan.rank_view(rank), LiveSources(mine), DTYPES, wire, changes=changes)
        spread(mine, sources, rank, random_model(0))
        executor.run(received, is_full=False)
        previous.take()
        if rank == 3:
            for flat in received.flats.values():
                flat += 1
        executor.run(received, is_full=False)
        wrong[rank] = changes.num_wrong
        assert changes.moved.sent < changes.moved.planned_sent

    wire.run(rank_body)
    has_noticed = wrong.pop(3) > 0
    assert has_noticed == (kind is Readable) and not any(wrong.values())
