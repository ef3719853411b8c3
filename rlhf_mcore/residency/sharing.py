"""Share a rank's device among its models.

A part is on the device while it is used. It is offloaded if others need the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from rlhf_mcore.platform import Platform
from rlhf_mcore.protocols import MEMORY, Sleeper
from rlhf_mcore.residency.ledger import ENGINE_CACHE, ENGINE_WEIGHTS, OPTIMIZER, WEIGHTS, Ledger
from rlhf_mcore.residency.parts import MovablePart

_OF_ENGINES = dict(zip(MEMORY, (ENGINE_WEIGHTS, ENGINE_CACHE), strict=True))


@dataclass(slots=True)
class DeviceSharing:
    """The movable parts of all models of this rank.

    An unused part is copied to the host at once, while the device does other work. Its memory is freed only if the
    next model or the engine needs it. If the part is used again before that, it does not move.
    """

    platform: Platform
    ledger: Ledger = field(default_factory=Ledger)
    parts: list[MovablePart] = field(default_factory=list)
    engine_bytes: int = 0  # size of this rank's part of an engine's weights
    sleep_level: int = 2  # for engines: see ``Sleeper``
    _allocated: dict[str, int] = field(default_factory=dict)
    _outside: dict[str, int] = field(default_factory=dict)
    _sleeping: int = 0  # bytes of a sleeping engine, which torch still counts as reserved

    def join(self, part: MovablePart) -> None:
        """Register a part that is on the device, and offload it between its uses from now on."""
        self.parts.append(part)
        self.ledger.add(part.name, part.num_bytes)
        self.send(part)

    @contextmanager
    def use(self, parts: Sequence[MovablePart], *, writes: bool = False, beside: bool = False) -> Iterator[None]:
        """Keep parts on the device within this block.

        ``writes``: the block modifies them. ``beside``: idle parts stay on the device too.
        """
        if not beside:
            self.make_room(0, keep=parts)
        for part in parts:
            self.bring(part)
            part.users += 1
        try:
            yield
        finally:
            for part in parts:
                part.users -= 1
                if writes:
                    part.mark_modified()
                if not part.users:
                    part.ready()
                    part.begin_storing()
            for part in parts:
                lingers = part.copied and part.lingers and ENGINE_CACHE not in self.ledger.resident
                if not lingers:
                    self.send(part)

    def bring(self, part: MovablePart) -> None:
        """Start to copy a part to the device, if it is not there."""
        if not part.is_resident:
            part.come()
            self.ledger.add(part.name, part.num_bytes)

    def send(self, part: MovablePart) -> None:
        """Offload a part, if it is on the device and not in use."""
        if part.is_resident and not part.users:
            part.leave()
            self.ledger.remove(part.name)

    def make_room(self, num_bytes: int, keep: Collection[MovablePart] = ()) -> None:
        """Offload idle parts except ``keep``.

        If ``num_bytes`` is not 0, stop when that many bytes are free on the device.
        """
        idle = [part for part in self.parts if part.is_resident and not part.users and part not in keep]
        for part in sorted(idle, key=lambda part: part.name.endswith(WEIGHTS)):  # weights are used again first
            if num_bytes and (free := self.platform.free_bytes()) is not None and free >= num_bytes:
                return
            self.send(part)

    def wake(self, sleeper: Sleeper, tag: str) -> None:
        """Allocate an engine's weights or its cache on the device."""
        before = self.platform.free_bytes()
        with self._same_outside():
            sleeper.wake((tag,))
        if (name := _OF_ENGINES[tag]) not in self.ledger.resident:
            after = self.platform.free_bytes()
            self.ledger.add(name, before - after if before is not None and after is not None else 0)

    def sleep(self, sleeper: Sleeper) -> None:
        """Offload an engine until the next weights arrive."""
        with self._same_outside():
            sleeper.sleep(self.sleep_level)
        for name in self.ledger.resident.keys() & _OF_ENGINES.values():
            self.ledger.remove(name)

    def outside_bytes(self) -> int | None:
        """Return the device memory in use outside torch (CUDA, NCCL, other processes), or None if that is unknown."""
        found = self.platform.outside_bytes()
        return None if found is None else found + self._sleeping

    @contextmanager
    def _same_outside(self) -> Iterator[None]:
        """Attribute a change of the memory outside torch to an engine.

        An engine unmaps memory that torch counts as reserved.
        """
        before = self.outside_bytes()
        yield
        after = self.outside_bytes()
        if before is not None and after is not None:
            self._sleeping += before - after

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count memory used in this block for the phase ``name``."""
        self.platform.reset_peak()
        asleep = self._sleeping
        with self.ledger.phase(name):
            yield
        if (peak := self.platform.peak_bytes()) is not None:
            peak -= min(asleep, self._sleeping)  # torch counts the memory of a sleeping engine as allocated, too
            self._allocated[name] = max(self._allocated.get(name, 0), peak)
        if (outside := self.outside_bytes()) is not None:
            self._outside[name] = max(self._outside.get(name, 0), outside)

    def pop(self) -> dict[str, float]:
        """Return this rank's memory metrics since the last call.

        - ``memory/<phase>_bytes``: the peak of the movable parts, if there are any.
        - ``memory/<phase>_allocated_bytes``: the peak of everything that torch allocated on a GPU, including passes,
          without an engine that sleeps in the whole phase.
        - ``memory/<phase>_outside_bytes``: see :meth:`outside_bytes`, at the end of a phase.
        """
        metrics = {f"memory/{name}_allocated_bytes": float(peak) for name, peak in self._allocated.items()}
        metrics |= {f"memory/{name}_outside_bytes": float(size) for name, size in self._outside.items()}
        self._allocated, self._outside = {}, {}
        moved = self.ledger.pop()
        return metrics | (moved if self.parts else {})

    def settle(self) -> None:
        """Offload all idle parts, and release the device's cached memory to other allocators, such as an engine's."""
        self.make_room(0)
        self.platform.empty_cache()


@dataclass(slots=True)
class Movable:
    """The movable parts of one model, by kind. A model without parts never moves.

    ``layers``: weights that are not in ``parts``, because they move layer by layer in a pass.
    """

    sharing: DeviceSharing | None = None
    parts: dict[str, MovablePart] = field(default_factory=dict)
    layers: list[MovablePart] = field(default_factory=list)

    def add(self, kind: str, part: MovablePart) -> None:
        assert self.sharing is not None
        self.parts[kind] = part
        self.sharing.join(part)

    def add_layers(self, name: str, layers: Sequence[Module]) -> None:
        """Move layers that run in sequence separately.

        While a layer runs, the next layer is copied. After it has run, it is offloaded.
        """
        assert self.sharing is not None
        first, platform = len(self.layers), self.sharing.platform
        for layer in layers:
            tensors = (*layer.parameters(), *layer.buffers())
            self.layers.append(
                MovablePart(f"{name} layer {len(self.layers)} {WEIGHTS}", tensors, platform, lingers=False)
            )
            self.sharing.join(self.layers[-1])
        for number, layer in enumerate(layers, first):
            layer.register_forward_pre_hook(partial(self._enter_layer, self.layers[number : number + 2]))
            layer.register_forward_hook(partial(self._exit_layer, self.layers[number]), always_call=True)

    @contextmanager
    def use(self, *kinds: str, writes: bool = False, beside: bool = False) -> Iterator[None]:
        """Keep the parts of these kinds on the device within this block.

        All are ready except the optimizer: see :meth:`ready`.
        """
        if self.sharing is None:
            yield
            return
        layers = self.layers if WEIGHTS in kinds else []
        wanted = [self.parts[kind] for kind in kinds if kind in self.parts]
        with self.sharing.use([*wanted, *layers], writes=writes, beside=beside):
            self.ready(*(kind for kind in kinds if kind != OPTIMIZER))
            for part in layers:
                part.ready()
            yield

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Keep the weights on the device for forward passes.

        At most two of the layers that move separately are there at once.
        """
        if not self.layers:
            with self.use(WEIGHTS):
                yield
            return
        assert self.sharing is not None
        with self.sharing.use([self.parts[WEIGHTS]]):
            self.ready(WEIGHTS)
            try:
                yield
            finally:
                for part in self.layers:
                    self.sharing.send(part)

    def ready(self, *kinds: str) -> None:
        """Make later operations of the device wait for the copies of these parts."""
        for kind in kinds:
            if kind in self.parts:
                self.parts[kind].ready()

    def _enter_layer(self, coming: Sequence[MovablePart], *_: Any) -> None:
        assert self.sharing is not None
        for part in coming:
            self.sharing.bring(part)
        coming[0].ready()

    def _exit_layer(self, part: MovablePart, *_: Any) -> None:
        assert self.sharing is not None
        self.sharing.send(part)

    def current(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or its copy on the host if its part is not on the device."""
        for part in (*self.parts.values(), *self.layers):
            if part.holds(tensor) and not part.is_resident:
                return part.on_host(tensor)
        return tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory that tensors use.

    A storage with several views counts once, for example for latent attention's projection.
    """
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
