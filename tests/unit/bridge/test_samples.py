"""Samples of tensors: where they are drawn, that shards find their own, and what differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.bridge.run.samples import COUNT, Drawn, Samples, differing
from rlhf_mcore.parallel.collectives import world_group

SHAPES = {"matrix": (96, 320), "norm": (5,), "experts": (80, 6, 7)}
DTYPES = dict.fromkeys(SHAPES, torch.float32)
CPU = torch.device("cpu")


def whole(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Every element is its place in the tensor."""
    shape = SHAPES[name]
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)


def contiguous(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    return Piece(name, start, shape, 0, strides)


@pytest.mark.parametrize("version", [0, 1, 17, 10**6])
@pytest.mark.parametrize("shards", [2, 8, COUNT])
def test_every_shard_of_a_matrix_along_either_axis_has_a_sample(shards: int, version: int) -> None:
    samples = Samples(SHAPES, DTYPES)
    place = samples.coordinates(version)[samples.firsts[0] : samples.firsts[1], 1:]
    assert len(place) == COUNT
    for axis in (0, 1):
        assert set((place[:, axis] * shards // SHAPES["matrix"][axis]).tolist()) == set(range(shards))


def test_every_element_of_a_short_tensor_and_every_stacked_expert_has_one() -> None:
    samples = Samples(SHAPES, DTYPES)
    place = samples.coordinates(3)
    assert set(place[samples.firsts[1] : samples.firsts[2], 2].tolist()) == set(range(5))
    experts = place[samples.firsts[2] :]
    assert set(experts[:, 0].tolist()) == set(range(80))
    assert {samples.name_of(int(number)) for number in (0, COUNT, 2 * COUNT)} == set(SHAPES)
    for axis, size in enumerate((80, 6, 7)):
        assert experts[:, axis].min() >= 0 and experts[:, axis].max() < size


def test_versions_draw_other_elements() -> None:
    samples = Samples(SHAPES, DTYPES)
    seen = {tuple(row) for version in range(20) for row in samples.coordinates(version)[:COUNT].tolist()}
    assert len(seen) > 0.9 * 20 * COUNT  # a range has 3 x 10 elements, of which some are drawn twice


def test_a_shard_that_is_stored_transposed_reads_the_elements_of_its_rectangle() -> None:
    samples = Samples(SHAPES, DTYPES)
    # Rows 10 to 50 and columns 100 to 300 of the matrix, transposed, behind the norm's last four elements.
    rectangle = whole("matrix")[10:50, 100:300]
    flat = torch.cat([whole("norm")[1:], rectangle.t().reshape(-1)])
    pieces = [Piece("norm", (1,), (4,), 0, (1,)), Piece("matrix", (10, 100), (40, 200), 4, (1, 40))]
    held = samples.describe([("mine", pieces)])
    drawn = Drawn(held.reads(5, CPU))
    drawn.add("mine", flat)
    numbers = torch.cat(drawn.numbers)
    place = samples.coordinates(5)[numbers.numpy()]
    is_matrix = numbers.numpy() < COUNT
    expected = np.where(is_matrix, place[:, 1] * 320 + place[:, 2], place[:, 2])
    assert torch.equal(torch.cat(drawn.bits).to(torch.int32).view(torch.float32).long(), torch.from_numpy(expected))
    every = samples.coordinates(5)[:COUNT]
    inside = (every[:, 1] >= 10) & (every[:, 1] < 50) & (every[:, 2] >= 100) & (every[:, 2] < 300)
    assert is_matrix.sum() == inside.sum() > 0


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("wrong", ["", "matrix", "experts"])
def test_the_tensor_that_differs_is_named(wrong: str) -> None:
    """The engine holds bf16, in which the trainer's fp32 are compared."""
    samples = Samples(SHAPES, dict.fromkeys(SHAPES, torch.bfloat16))
    held = samples.describe([(name, [contiguous(name, (0,) * len(shape), shape)]) for name, shape in SHAPES.items()])
    sent, received = Drawn(held.reads(2, CPU)), Drawn(held.reads(2, CPU))
    for name in SHAPES:
        sent.add(name, whole(name).view(-1))
        other = whole(name).bfloat16()
        if name == wrong:
            other = other.flip(0)
        received.add(name, other.reshape(-1))
    assert differing(samples, sent, received, CPU, world_group()) == ([wrong] if wrong else [])
    assert differing(samples, sent, Drawn({}), CPU, world_group()) == []
