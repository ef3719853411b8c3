"""Compare the hashes that verify a sync with a slow version, and detect errors that a plain sum would miss."""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import QWEN_235B, destinations
from rlhf_mcore.bridge.map.pieces import Piece, Place, contiguous_strides, view
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.run import verify
from rlhf_mcore.bridge.run.verify import compare, piece_digest, tensor_digests
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.protocols import SyncMismatch
from tests.machine_speed import scale_seconds
from tests.messages import expect_error

SHAPE = (3, 4)
VALUES = torch.tensor([[1.0, -2.0, 0.0, 3.5], [1e-8, 7.0, -0.0, 2.0], [9.0, -1e6, 0.25, 1.5]])
ALL = Piece("w", (0, 0), SHAPE, 0, (4, 1))
# The first two columns, stored transposed after five other elements of a local tensor, and the other columns in order.
LEFT, RIGHT = Piece("w", (0, 0), (3, 2), 5, (1, 3)), Piece("w", (0, 2), (3, 2), 0, (2, 1))


def digest(values: torch.Tensor) -> int:
    return int(piece_digest(values.contiguous().view(-1), ALL, SHAPE, values.dtype))


def test_a_digest_leaves_weights_that_can_leave_memory() -> None:
    """numpy's view of a tensor marks its storage as not resizable."""
    values = torch.randn(64)
    digest(values)
    values.untyped_storage().resize_(0)
    assert values.untyped_storage().nbytes() == 0


def on_device(flat: torch.Tensor, piece: Piece, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Hash like on a GPU."""
    return int(verify._digest_on_device(view(flat, piece), piece.start, shape, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (4, 3, 5), (2, 3, 2, 5)], ids=len)
def test_a_host_and_a_device_have_the_same_digest(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "HOST_ELEMENTS", 12)
    shape = shape or (40,)
    flat = torch.randn(prod(shape) + 3, generator=torch.Generator().manual_seed(1)).mul(99).to(dtype)
    strides = contiguous_strides(shape[::-1])[::-1]  # not stored row by row
    piece, whole = Piece("w", tuple(range(len(shape))), shape, 0, strides), tuple(size + 9 for size in shape)
    assert int(piece_digest(flat, piece, whole, dtype)) == on_device(flat, piece, whole, dtype)


def slow_digest(values: torch.Tensor) -> int:
    """Sum splitmix64 (Steele et al. 2014) of every element's bits and position modulo 2^64, with Python integers."""
    total, modulus = 0, 1 << 64
    bits = values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])
    for place, element in enumerate(bits.flatten().tolist()):
        state = (element * 0x94D049BB133111EB + (place + 1) * 0x9E3779B97F4A7C15) % modulus
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % modulus
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % modulus
        total += state ^ (state >> 31)
    return (total + modulus // 2) % modulus - modulus // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_digest_is_that_of_the_slow_version(dtype: torch.dtype) -> None:
    assert digest(VALUES.to(dtype)) == slow_digest(VALUES.to(dtype))


def test_a_large_piece_is_hashed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, whole = slow_digest(VALUES), piece_digest(VALUES[:, 2:].reshape(-1), RIGHT, SHAPE, torch.float32)
    for elements in (1, 4, 8):  # one row, one row, two of the three rows
        monkeypatch.setattr(verify, "CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(verify, "HOST_ELEMENTS", elements)
        assert digest(VALUES) == on_device(VALUES.view(-1), ALL, SHAPE, torch.float32) == expected
        assert piece_digest(VALUES[:, 2:].reshape(-1), RIGHT, SHAPE, torch.float32) == whole


def test_pieces_add_up_to_the_whole_however_they_are_stored() -> None:
    left = torch.cat([torch.full((5,), torch.nan), VALUES[:, :2].t().reshape(-1)])
    parts = [piece_digest(left, LEFT, SHAPE, torch.float32)]
    parts.append(piece_digest(VALUES[:, 2:].reshape(-1), RIGHT, SHAPE, torch.float32))
    assert (sum(map(int, parts)) - digest(VALUES)) % (1 << 64) == 0


def test_a_digest_is_of_the_dtype_of_the_engine() -> None:
    assert int(piece_digest(VALUES.view(-1), ALL, SHAPE, torch.bfloat16)) == digest(VALUES.bfloat16())


def test_an_exchange_of_two_elements_and_a_changed_sign_of_zero_are_noticed() -> None:
    exchanged, signed = VALUES.clone(), VALUES.clone()
    exchanged[0, 0], exchanged[2, 3] = VALUES[2, 3], VALUES[0, 0]
    signed[1, 2] = 0.0
    assert len({digest(values) for values in (VALUES, exchanged, signed)}) == 3


def places(*pieces: Piece) -> list[Place]:
    return [Place(f"buffer {number}", (piece,), (0,)) for number, piece in enumerate(pieces)]


def hashes(*values: int) -> list[torch.Tensor | None]:
    return [torch.tensor(value) for value in values]


@pytest.mark.usefixtures("world")
def test_all_hashes_of_a_rank_come_to_the_host_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are hashed row by row without a transfer per piece."""
    transfers, cpu = [], torch.Tensor.cpu

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert function is not torch.ops.aten._local_scalar_dense.default, "the host waits for a number"
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(verify, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (transfers.append(tuple(tensor.shape)), cpu(tensor))[1])
    parts = VALUES[:, :2].reshape(-1), VALUES[:, 2:].reshape(-1)
    pieces = [replace(RIGHT, start=(0, 0)), RIGHT]
    with Record():
        found = [
            verify._digest_on_device(view(flat, piece), piece.start, SHAPE, torch.float32)
            for flat, piece in zip(parts, pieces, strict=True)
        ]
    assert tensor_digests(found, places(*pieces), {"w": SHAPE}, world_group()) == {"w": slow_digest(VALUES)}
    assert transfers == [(2,)]


@pytest.mark.usefixtures("world")
def test_digests_of_tensors_are_sums_of_those_of_rectangles_each_counted_once() -> None:
    group = dist.group.WORLD
    assert group is not None
    held = places(LEFT, RIGHT, RIGHT)
    assert tensor_digests(hashes(5, -2, -2), held, {"w": SHAPE}, group) == {"w": 3}
    assert tensor_digests([*hashes(5, -2), None], held, {"w": SHAPE}, group) == {"w": 3}
    with expect_error(SyncMismatch, field=("rank 0", "w"), value="(0, 2)"):
        tensor_digests(hashes(5, -2, -3), held, {"w": SHAPE}, group)
    with expect_error(SyncMismatch, field="w", value=(6, 12)):
        tensor_digests(hashes(5), places(LEFT), {"w": SHAPE}, group)


@pytest.mark.usefixtures("world")
def test_digests_of_256_ranks_with_37_000_pieces_each_take_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of 235B-A22B have tensor parallelism 8. Each rank holds a part of every expert."""
    held, shapes = destinations(QWEN_235B, tp=8, num_engines=32), hf_shapes(QWEN_235B.geometry)
    own = [piece for place in held if 0 in place.ranks for piece in place.pieces]
    assert len(own) > 36_000
    rows = torch.tensor([[value, 1] for value in range(len(own))]).repeat(256, 1)
    monkeypatch.setattr(verify, "all_gather_json", lambda length, group: [length] * 256)
    monkeypatch.setattr(verify, "all_gather_rows", lambda mine, group: rows)
    begun = time.process_time()
    found = tensor_digests([None] * len(own), held, shapes, world_group())
    assert time.process_time() - begun < scale_seconds(3)
    assert found.keys() == shapes.keys()
    name = "model.layers.93.mlp.experts.127.up_proj.weight"
    places_of_name = [place for place, piece in enumerate(own) if piece.hf_name == name]
    assert found[name] == 8 * sum(places_of_name), "8 parts, each held by 32 ranks"
    rows[200 * len(own) + 20_000, 0] += 1
    with expect_error(SyncMismatch, field=("rank 200", own[20_000].hf_name)):
        tensor_digests([None] * len(own), held, shapes, world_group())


def test_tensors_that_differ_are_named() -> None:
    compare({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2})  # each engine holds a part of the tensors
    with expect_error(SyncMismatch, field="b", value=(1, 2)):
        compare({"a": 1, "b": 2}, {"a": 1, "b": 3})
    with pytest.raises(SyncMismatch, match="among them c"):
        compare({"a": 1}, {"a": 1, "c": 1})
