"""Define both ends of a transfer: the tensors to read, and the tensors to write (for example the live tensors of an engine)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from rlhf_mcore.bridge.map.engine import reloading
from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.bridge.plan.rank_plan import Bucket, RankPlan
from rlhf_mcore.platform import current_platform

Written = Callable[[EngineParameter, Tensor], None]
_ALIGNMENT = 64  # bytes, for tensors in a shared buffer


class Sources(ABC):
    """Tensors to send: this rank's model tensors, or tensors computed from them (merged, averaged, cast).

    ``device`` is the tensors' device. ``is_static``: ``open`` always returns the same memory, so each bucket is
    opened once for all runs and never closed.
    """

    device: torch.device
    is_static: bool

    def prepare(self) -> None:  # noqa: B027
        """Compute shared values before a sync opens buckets. This is a collective call over the model's ranks."""

    @abstractmethod
    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """Return flat tensors by buffer name, including ``bucket.source_buffers``.

        Values are cast to the wire's dtype later.
        """

    @abstractmethod
    def close(self, bucket: Bucket) -> None:
        """Drop the tensors of a bucket that has been sent and copied. A few buckets are open at the same time."""


class LiveSources(Sources):
    """The live tensors, flat, by buffer name. They may be empty on a rank that only receives."""

    is_static = True

    def __init__(self, flats: Mapping[str, Tensor]):
        self._flats = flats
        self.device = next((flat.device for flat in flats.values()), current_platform().device())

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        return self._flats

    def close(self, bucket: Bucket) -> None: ...


class KeptSources(Sources):
    """Sources that can be sent again after a model update, with their values at the last ``take``."""

    @abstractmethod
    def take(self) -> None:
        """Copy the tensors that an update changes."""


class BuiltSources(KeptSources):
    """Tensors that are built when a bucket reads them, and freed when the last open bucket is closed."""

    is_static = False

    def __init__(self) -> None:
        self._opened: dict[str, tuple[Tensor, int]] = {}  # flat tensor, and the number of open buckets that read it

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        for name in bucket.source_buffers:
            flat, readers = self._opened.get(name) or (self._build(name), 0)
            self._opened[name] = flat, readers + 1
        return {name: self._opened[name][0] for name in bucket.source_buffers}

    def close(self, bucket: Bucket) -> None:
        for name in bucket.source_buffers:
            flat, readers = self._opened.pop(name)
            if readers > 1:
                self._opened[name] = flat, readers - 1
            else:
                self._free(name)

    @abstractmethod
    def _build(self, name: str) -> Tensor:
        """Compute the flat tensor of a buffer, or return the live tensor."""

    def _free(self, name: str) -> None:
        """Free what building a buffer has opened."""


class HostCopies(KeptSources):
    """Host copies of tensors at the last ``take``. This version can be sent after the model was updated."""

    def __init__(self, flats: Mapping[str, Tensor]):
        """Store references to the live flat tensors by buffer name. They may be off the device until ``take``."""
        self._flats = flats
        self._copies: dict[str, Tensor] = {}
        self.device = next((flat.device for flat in flats.values()), current_platform().device())
        self.is_static = current_platform().is_host(self.device)

    def take(self) -> None:
        """Copy the tensors. The first call allocates the memory."""
        if not self._copies:
            sizes = [flat.numel() * flat.element_size() for flat in self._flats.values()]
            starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
            memory = current_platform().host_buffer(starts[-1])
            for (name, flat), start, size in zip(self._flats.items(), starts, sizes, strict=False):
                self._copies[name] = memory[start : start + size].view(flat.dtype)
        copies = current_platform().copies()
        copies([(self._copies[name], flat) for name, flat in self._flats.items()])
        copies.synchronize()

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        return self._copies if self.is_static else self.read(bucket.source_buffers)

    def read(self, names: Iterable[str]) -> Mapping[str, Tensor]:
        """Return some of the copies on the device."""
        return {name: self._copies[name].to(self.device) for name in names}

    def close(self, bucket: Bucket) -> None: ...


class Destinations(ABC):
    """Tensors for received elements."""

    @abstractmethod
    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """Return the flat tensors that a bucket writes, by buffer name."""
        ...

    def written(self) -> Mapping[str, Tensor]:
        """Return the flat tensors that contain the last written values, by buffer name."""
        return {}

    @abstractmethod
    def close(self, bucket: Bucket) -> None:
        """Close a written bucket. The layers that it completes can be used afterwards."""
        ...


@dataclass(slots=True)
class _Group:
    """The repacked parameters of one layer, from their first to their last bucket."""

    parameters: Sequence[EngineParameter]
    first: int
    last: int
    stack: ExitStack = field(default_factory=ExitStack)
    flats: Mapping[str, Tensor] = field(default_factory=dict)


class EngineDestinations(Destinations):
    """The destinations of one engine rank during one sync.

    Parameters that kernels read directly are written in place. A layer that the engine repacks is opened at its
    first bucket and closed after its last bucket; then the engine processes it. Padding is set to zero.

    Args:
        model: the engine's live model.
        engine: the engine's map.
        plan: this rank's plan. Its buckets are written in order.
        poison: fill the engine with NaN first, to expose elements that are not written.
        written: called with every complete parameter and its flat tensor.
        names: the Hugging Face names that the plan transfers; None: all.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: EngineMap,
        plan: RankPlan,
        *,
        poison: bool = False,
        written: Written | None = None,
        names: Collection[str] | None = None,
    ):
        self._model, self._engine, self._poison, self._written = model, engine, poison, written
        self._names = names
        self._flats = engine.views(model)
        for parameter in engine.direct:
            self._prepare(parameter, self._flats[parameter.name])
        self._groups = _groups(engine, plan)

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """Return the flat tensors that the bucket writes."""
        for group in self._groups:
            if group.first == bucket.index:
                group.flats = group.stack.enter_context(self._reload(group))
                self._flats.update(group.flats)
        return self._flats

    def written(self) -> Mapping[str, Tensor]:
        return (
            {} if self._poison else {parameter.name: self._flats[parameter.name] for parameter in self._engine.direct}
        )

    def close(self, bucket: Bucket) -> None:
        """Make the engine process the layers that the bucket has completed."""
        for group in self._groups:
            if group.last == bucket.index:
                group.stack.close()
                for name in group.flats:
                    del self._flats[name]

    @contextmanager
    def _reload(self, group: _Group) -> Iterator[Mapping[str, Tensor]]:
        with reloading(self._model, group.parameters) as flats:
            for parameter in group.parameters:
                self._prepare(parameter, flats[parameter.name])
            yield flats
            self._finish(group.parameters, flats)

    def finish(self) -> None:
        """Report the direct parameters after everything is written."""
        self._finish(self._engine.direct, self._flats)

    def abandon(self) -> None:
        """Close open layers after a failed sync. The engine's weights are unusable."""
        for group in self._groups:
            group.stack.close()

    def _prepare(self, parameter: EngineParameter, flat: Tensor) -> None:
        if self._poison and flat.is_floating_point():
            parts = [flat]
            if self._names is not None:
                parts = [view(flat, piece) for piece in parameter.pieces if piece.hf_name in self._names]
            for part in parts:
                part.fill_(float("nan"))
        for begin, end in parameter.padding:
            flat[begin:end].zero_()

    def _finish(self, parameters: Sequence[EngineParameter], flats: Mapping[str, Tensor]) -> None:
        if self._written is not None:
            for parameter in parameters:
                self._written(parameter, flats[parameter.name])


def _groups(engine: EngineMap, plan: RankPlan) -> list[_Group]:
    if not engine.repacked:
        return []
    touched: dict[str, list[int]] = {}
    for bucket in plan.buckets:
        for name in bucket.destination_buffers:
            touched.setdefault(name, []).append(bucket.index)
    groups = []
    for parameters in engine.repacked:
        buckets = [bucket for parameter in parameters for bucket in touched.get(parameter.name, [])]
        if buckets:
            groups.append(_Group(parameters, min(buckets), max(buckets)))
    return groups
