"""Check the values of a safetensors file while its bytes are read for their hash, so that each byte is read once.

Master weights and the weights that were rounded from them are in different files, which different ranks read. Both
get sums like the digests of a sync (``bridge.run.verify``). Equal sums mean equal elements, for any split of the
tensors.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from math import prod
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.state_files import KINDS, MASTER, SECOND_MOMENT
from rlhf_mcore.bridge.files.state_reader import value_problem
from rlhf_mcore.bridge.files.tensor_files import CODES
from rlhf_mcore.bridge.map.rectangles import Rectangle, contiguous_strides, whole
from rlhf_mcore.bridge.run.verify import mix

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_MASK = 2**64 - 1
_CACHED_ELEMENTS = 2**15  # mixing creates several int64 tensors, which fit into a core's cache

Types = Mapping[str, tuple[str, Sequence[int]]]  # for weights: dtype in safetensors' spelling, and shape


@dataclass(frozen=True, slots=True)
class FileValues:
    """Properties of the values in all tensors of a file.

    ``bounds`` contains the smallest and largest values of each tensor with impossible values. ``sums`` contains
    the digest of each tensor whose rounded values are compared.
    """

    bounds: Mapping[str, tuple[float, float]]
    sums: Mapping[str, int]

    def problem(self, called: str, key: str) -> str | None:
        """Return ``value_problem`` for the tensor of a key."""
        if key not in self.bounds:
            return None
        return value_problem(called, torch.tensor(self.bounds[key]), key.startswith(f"{SECOND_MOMENT}/"))


class ValueReader(RawIOBase):
    """Read a safetensors file, and check the values that it returns.

    ``compared`` contains the weights that have master weights. Their sums are computed.
    """

    def __init__(self, file: RawIOBase, compared: Types):
        self._file, self._compared = file, compared
        self._bounds: dict[str, tuple[float, float]] = {}
        self._sums: dict[str, int] = {}
        self._is_complete = False
        self._steps: Generator[int, memoryview] | None = None
        self._next_bytes: int | None = 0  # None: the rest of the file is not checked

    @property
    def values(self) -> FileValues | None:
        """Return the properties of the values after the file is read.

        Return None if the file has no tensors, or has tensors other than weights and states.
        """
        return FileValues(self._bounds, self._sums) if self._is_complete else None

    def readinto(self, buffer: Any) -> int:
        """Read a part of the file with a size that suits the check."""
        view = memoryview(buffer)
        if self._next_bytes is None:
            return self._file.readinto(view) or 0
        if self._steps is None:
            self._steps = self._look(len(view))
            self._next_bytes = next(self._steps)
        count = 0
        while count < self._next_bytes and (got := self._file.readinto(view[count : self._next_bytes])):
            count += got
        try:
            self._next_bytes = self._steps.send(view[:count])
        except Exception:  # any file may be read here; damage shows in its hash, or when it is opened
            self._next_bytes = None
        return count

    def _look(self, most: int) -> Generator[int, memoryview]:
        """Yield the number of bytes to read next, and receive these bytes."""
        num_left = int.from_bytes((yield 8), "little")
        header = bytearray()
        while num_left:
            data = yield min(num_left, most)
            header += data
            num_left -= len(data)
            assert data, "the file ends in its header"
        for name, dtype, shape in _parse(header):
            tensor, first, numel = self._describe(name, dtype, shape), 0, prod(shape)
            ends = []
            while first < numel:
                count = min(most // dtype.itemsize, numel - first)
                if tensor is not None and tensor.run > count:
                    count = min(count, tensor.run - first % tensor.run)
                flat = torch.frombuffer((yield count * dtype.itemsize), dtype=dtype, count=count)
                ends += [float(value) for value in flat.aminmax()]
                if tensor is not None:
                    self._sums[name] = (self._sums.get(name, 0) + tensor.sum_of(flat, first)) & _MASK
                first += count
            if ends and value_problem("", torch.tensor(ends), name.startswith(f"{SECOND_MOMENT}/")):
                low, high = torch.tensor(ends).aminmax()  # both are NaN if any value is NaN
                self._bounds[name] = float(low), float(high)
        self._is_complete = True

    def _describe(self, key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> _Compared | None:
        """Describe a tensor whose sum is needed, or return None."""
        if key in self._compared:
            return _Compared(whole(shape), shape, dtype)
        kind, _, region = key.partition("/")
        name, _, spans = region.removesuffix("]").rpartition("[")
        if kind not in KINDS or kind != MASTER or name not in self._compared:
            return None
        pairs = [tuple(map(int, span.split(":"))) for span in spans.split(",") if span]
        rectangle = Rectangle(tuple(begin for begin, _ in pairs), tuple(end - begin for begin, end in pairs))
        assert rectangle.shape == shape, key
        code, full = self._compared[name]
        return _Compared(rectangle, tuple(full), _DTYPES[code])


class _Compared:
    """A rectangle of a weight, or of its master weights.

    ``run`` is its number of consecutive elements in the whole tensor.
    """

    def __init__(self, rectangle: Rectangle, shape: tuple[int, ...], dtype: torch.dtype):
        self._rectangle, self._strides, self._dtype = rectangle, contiguous_strides(shape), dtype
        self.run, self._outer = 1, len(shape)
        while self._outer:
            self._outer -= 1
            self.run *= rectangle.shape[self._outer]
            if rectangle.shape[self._outer] != shape[self._outer]:
                break

    def sum_of(self, flat: Tensor, first: int) -> int:
        """Return the digest sum of the rounded elements ``flat``, which start at element ``first`` of the rectangle."""
        total = 0
        for begin in range(0, flat.numel(), _CACHED_ELEMENTS):
            part = flat[begin : begin + _CACHED_ELEMENTS].to(self._dtype) + 0.0  # makes -0.0 equal to 0.0
            total += int(mix(part, self._positions(first + begin, part.numel())).sum())
        return total

    def _positions(self, first: int, count: int) -> Tensor:
        """Return the positions of the rectangle's elements in the flat tensor."""
        start, shape = self._rectangle
        runs = torch.arange(first // self.run, (first + count - 1) // self.run + 1)
        begins = torch.full_like(
            runs, sum(start[axis] * self._strides[axis] for axis in range(self._outer, len(shape)))
        )
        for axis in reversed(range(self._outer)):
            begins += (runs % shape[axis] + start[axis]) * self._strides[axis]
            runs = runs // shape[axis]
        skipped = first % self.run
        if begins.numel() == 1:
            return begins + torch.arange(skipped, skipped + count)
        return (begins[:, None] + torch.arange(self.run)).view(-1)[skipped : skipped + count]


def _parse(header: bytes | bytearray) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """List the tensors of a header in the order of their bytes."""
    found = []
    for name, entry in json.loads(header).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found.append((begin, end, name, _DTYPES[entry["dtype"]], tuple(entry["shape"])))
    found.sort(key=lambda item: item[:2])
    place = 0
    for begin, end, name, dtype, shape in found:
        assert begin == place and end == begin + prod(shape) * dtype.itemsize, name
        place = end
    return [(name, dtype, shape) for _, _, name, dtype, shape in found]
