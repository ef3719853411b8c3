"""How the models of a rank share its device: a part is on it while it is used, and leaves when others need the room."""

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
from rlhf_mcore.residency.parts import Part

_OF_ENGINES = dict(zip(MEMORY, (ENGINE_WEIGHTS, ENGINE_CACHE), strict=True))


@dataclass(slots=True)
class DeviceSharing:
    """The parts that move on this rank, of all its models.

    A part that is needed no longer is copied to the host at once, while the device does other things, and freed when something else is
    to come: the next model, or the engine. So what is used again next does not travel.
    """

    platform: Platform
    ledger: Ledger = field(default_factory=Ledger)
    parts: list[Part] = field(default_factory=list)
    engine_bytes: int = 0  # of the weights of this rank's part of an engine
    sleep_level: int = 2  # of engines: see ``Sleeper``
    _allocated: dict[str, int] = field(default_factory=dict)

    def join(self, part: Part) -> None:
        """From now on the part leaves the device between its uses; it is there now."""
        self.parts.append(part)
        self.ledger.add(part.name, part.num_bytes)
        self.send(part)

    @contextmanager
    def use(self, parts: Sequence[Part], *, writes: bool = False, beside: bool = False) -> Iterator[None]:
        """The parts are on the device within this block. ``writes``: the block changes them. ``beside``: what is idle stays too."""
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
                    part.changed()
                if not part.users:
                    part.ready()
                    part.begin_storing()
            for part in parts:
                lingers = part.copied and part.lingers and ENGINE_CACHE not in self.ledger.resident
                if not lingers:
                    self.send(part)

    def bring(self, part: Part) -> None:
        """Begin to bring a part to the device, if it is not there."""
        if not part.is_resident:
            part.come()
            self.ledger.add(part.name, part.num_bytes)

    def send(self, part: Part) -> None:
        """A part that nobody uses leaves the device, if it is there."""
        if part.is_resident and not part.users:
            part.leave()
            self.ledger.remove(part.name)

    def make_room(self, num_bytes: int, keep: Collection[Part] = ()) -> None:
        """Idle parts leave the device, but for those to ``keep``. With ``num_bytes``: only until so many bytes are free there."""
        idle = [part for part in self.parts if part.is_resident and not part.users and part not in keep]
        for part in sorted(idle, key=lambda part: part.name.endswith(WEIGHTS)):  # weights are used again first
            if num_bytes and (free := self.platform.free_bytes()) is not None and free >= num_bytes:
                return
            self.send(part)

    def wake(self, sleeper: Sleeper, tag: str) -> None:
        """An engine's weights, or its cache, come to the device."""
        before = self.platform.free_bytes()
        sleeper.wake((tag,))
        if (name := _OF_ENGINES[tag]) not in self.ledger.resident:
            after = self.platform.free_bytes()
            self.ledger.add(name, before - after if before is not None and after is not None else 0)

    def sleep(self, sleeper: Sleeper) -> None:
        """An engine leaves the device until the next weights come."""
        sleeper.sleep(self.sleep_level)
        for name in self.ledger.resident.keys() & _OF_ENGINES.values():
            self.ledger.remove(name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What happens in the block counts for the phase ``name``."""
        self.platform.reset_peak()
        with self.ledger.phase(name):
            yield
        if (peak := self.platform.peak_bytes()) is not None:
            self._allocated[name] = max(self._allocated.get(name, 0), peak)

    def pop(self) -> dict[str, float]:
        """Metrics of this rank since the last call. ``memory/<phase>_bytes``: the most that was there at a time of what moves, if
        anything does. ``memory/<phase>_allocated_bytes``: of everything that torch has allocated on a GPU, for passes too."""
        allocated = {f"memory/{name}_allocated_bytes": float(peak) for name, peak in self._allocated.items()}
        self._allocated = {}
        moved = self.ledger.pop()
        return allocated | (moved if self.parts else {})

    def settle(self) -> None:
        """Nothing idle stays, and the device's memory is given back to whoever allocates in another way, as an engine does."""
        self.make_room(0)
        self.platform.empty_cache()


@dataclass(slots=True)
class Movable:
    """The parts of one model that move, by kind; without any, the model stays where it is.

    ``layers``: weights that are not in ``parts``, because in a pass they come one layer after the other.
    """

    sharing: DeviceSharing | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    layers: list[Part] = field(default_factory=list)

    def add(self, kind: str, part: Part) -> None:
        assert self.sharing is not None
        self.parts[kind] = part
        self.sharing.join(part)

    def add_layers(self, name: str, layers: Sequence[Module]) -> None:
        """Layers that run one after the other. While one runs the next is on its way; what has run leaves."""
        assert self.sharing is not None
        first, platform = len(self.layers), self.sharing.platform
        for layer in layers:
            tensors = (*layer.parameters(), *layer.buffers())
            self.layers.append(Part(f"{name} layer {len(self.layers)} {WEIGHTS}", tensors, platform, lingers=False))
            self.sharing.join(self.layers[-1])
        for number, layer in enumerate(layers, first):
            layer.register_forward_pre_hook(partial(self._enter_layer, self.layers[number : number + 2]))
            layer.register_forward_hook(partial(self._exit_layer, self.layers[number]), always_call=True)

    @contextmanager
    def use(self, *kinds: str, writes: bool = False, beside: bool = False) -> Iterator[None]:
        """The parts of these kinds are on the device within this block, and ready, but for the optimizer: see :meth:`ready`."""
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
        """As ``use(WEIGHTS)``, around forward passes: of layers that come one by one no more than two are there at a time."""
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
        """Parts whose way to the device has begun are there for all that the device does from here on."""
        for kind in kinds:
            if kind in self.parts:
                self.parts[kind].ready()

    def _enter_layer(self, coming: Sequence[Part], *_: Any) -> None:
        assert self.sharing is not None
        for part in coming:
            self.sharing.bring(part)
        coming[0].ready()

    def _exit_layer(self, part: Part, *_: Any) -> None:
        assert self.sharing is not None
        self.sharing.send(part)

    def current(self, tensor: Tensor) -> Tensor:
        """The tensor, or its copy on the host where its part is not on the device."""
        for part in (*self.parts.values(), *self.layers):
            if part.holds(tensor) and not part.is_resident:
                return part.on_host(tensor)
        return tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory that tensors hold. What several are views of counts once, as what latent attention makes of a projection is."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
