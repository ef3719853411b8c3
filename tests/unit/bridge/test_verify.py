"""Hashes that prove a sync: against a slow version, and that they notice what a sum alone would not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.run import verify
from rlhf_mcore.bridge.run.verify import compare, piece_digest, tensor_digests
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.protocols import SyncMismatch
from tests.messages import refused

SHAPE = (3, 4)
VALUES = torch.tensor([[1.0, -2.0, 0.0, 3.5], [1e-8, 7.0, -0.0, 2.0], [9.0, -1e6, 0.25, 1.5]])
ALL = Piece("w", (0, 0), SHAPE, 0, (4, 1))
# The first two columns, which a local tensor holds transposed behind five other elements; and the others, in order.
LEFT, RIGHT = Piece("w", (0, 0), (3, 2), 5, (1, 3)), Piece("w", (0, 2), (3, 2), 0, (2, 1))


def digest(values: torch.Tensor) -> int:
    return int(piece_digest(values.contiguous().view(-1), ALL, SHAPE, values.dtype))


def slow_digest(values: torch.Tensor) -> int:
    """splitmix64 (Steele et al. 2014) of every element's bits and place, with integers of Python, summed modulo 2^64."""
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
    for elements in (1, 4, 8):  # one row, one row, two rows of the three
        monkeypatch.setattr(verify, "CHUNK_ELEMENTS", elements)
        assert digest(VALUES) == expected
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
    """None for each of its pieces, though they are hashed row by row."""
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
        found = [piece_digest(flat, piece, SHAPE, torch.float32) for flat, piece in zip(parts, pieces, strict=True)]
    assert tensor_digests(found, places(*pieces), {"w": SHAPE}, world_group()) == {"w": slow_digest(VALUES)}
    assert transfers == [(2,)]


@pytest.mark.usefixtures("world")
def test_digests_of_tensors_are_sums_of_those_of_rectangles_each_counted_once() -> None:
    group = dist.group.WORLD
    assert group is not None
    held = places(LEFT, RIGHT, RIGHT)
    assert tensor_digests(hashes(5, -2, -2), held, {"w": SHAPE}, group) == {"w": 3}
    assert tensor_digests([*hashes(5, -2), None], held, {"w": SHAPE}, group) == {"w": 3}
    with refused(SyncMismatch, field=("rank 0", "w"), value="(0, 2)"):
        tensor_digests(hashes(5, -2, -3), held, {"w": SHAPE}, group)
    with refused(SyncMismatch, field="w", value=(6, 12)):
        tensor_digests(hashes(5), places(LEFT), {"w": SHAPE}, group)


def test_tensors_that_differ_are_named() -> None:
    compare({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2})  # an engine holds a part of them
    with refused(SyncMismatch, field="b", value=(1, 2)):
        compare({"a": 1, "b": 2}, {"a": 1, "b": 3})
    with pytest.raises(SyncMismatch, match="among them c"):
        compare({"a": 1}, {"a": 1, "c": 1})
