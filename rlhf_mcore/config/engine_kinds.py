"""Declare what the engines differ in: ``rollout.engine`` is looked up here, once; everything else reads the declaration.

An engine declares itself in a ``KIND``: of a folder of ``rollout/``, or of an installed package that has an entry point of its name in
the group ``rlhf_mcore.engines``. A declaration imports neither torch nor the engine's libraries.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.plugins import find_plugins

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config, RolloutConfig
    from rlhf_mcore.geometry import ModelGeometry
    from rlhf_mcore.rollout.engine import Engine, EngineModel

SEQUENCES = 256  # that an engine decodes at once by default


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Declare what an engine can do, and how a rank gets one."""

    name: str  # of rollout.engine
    purpose: str = ""  # for the documentation
    packages: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # that it imports, and distributions that have them
    runs_apart: bool = True  # its ranks may be processes of Ray, on devices of their own
    is_sharded: bool = False  # rollout.layout.tp ranks are one engine; else each has a whole model
    # How its weights are written. In the rank's process: "loaders": the model's own loaders cut tensors, which a bridge traces;
    # "plain": parameters have Hugging Face's names and shapes. "full": elsewhere, full tensors are passed to a call
    weights: Literal["loaders", "plain", "full"] = "plain"
    records_routes: bool = False  # completions may have the experts that tokens went to
    sleeps: bool = False  # gives its device memory back while the trainer learns
    reserves_cache: bool = False  # when it starts; else its cache is what it draws at a time
    temperatures: tuple[float, float] = (0.0, math.inf)  # the least and the most that it draws at, beside 0
    attention_kernels: tuple[str, ...] = ()  # of model.attention
    holds_8_bits: bool = False  # on CUDA, with rollout.quantization; else it gets their values in the model's dtype
    own_keys: tuple[str, ...] = ()  # keys, or groups of them, that not every engine reads, and this one does

    @property
    def has_live_weights(self) -> bool:
        """Return whether its parameters are in the rank's process, where a bridge writes them."""
        return self.weights != "full"

    def reads(self, key: str) -> bool:
        """Return whether a key has an effect on this engine. For keys that some engines do not read."""
        return any(key == own or key.startswith(f"{own}.") for own in self.own_keys)

    def argument_problems(self, cfg: RolloutConfig) -> Iterator[str]:
        """List the faults of the keys that only this engine reads."""
        return iter(())

    def cache_width(self, cfg: RolloutConfig, model_width: int) -> int:
        """Return the bytes of a key or value in the cache. ``model_width``: of a weight."""
        return model_width

    def default_sequences(self, memory_bytes: int, device: str) -> int:
        """Return the default of ``rollout.max_num_seqs`` on a device. ``memory_bytes``: 0 on a CPU. ``device``: its name."""
        return SEQUENCES

    def model_problems(self, cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
        """Name what keeps this engine from drawing with the model of a resolved configuration on this machine."""
        return iter(())

    def adapter_problems(self, cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
        """Name what keeps this engine from adding adapters to the weights itself. ``geometry`` is that of the adapters."""
        yield f"rollout.engine={self.name} gets whole weights, with the adapters added"

    def preload(self) -> None:
        """Import the modules of ``build`` on a CPU, in a process that ranks will be forked from."""

    def prepare_process(self, *, deterministic: bool) -> None:
        """Set the environment of the engine's libraries, in a process without a trainer, before ``build``."""

    def joining(self) -> AbstractContextManager[Any]:
        """Enter this where communicators are made with processes that have not run ``prepare_process``."""
        return nullcontext()

    def build(self, cfg: RolloutConfig, model: EngineModel) -> Engine:
        """Build the engine of this rank. Every rank calls it at the same time, with torch.distributed initialised.

        Raises:
            ConfigError: there is none of this name, or it cannot be built: see the constructors.
        """
        raise ConfigError(f"rollout.engine={self.name!r} is not an engine; choose one of: {', '.join(ENGINES)}")


ENGINES: dict[str, EngineKind] = {}


def discover() -> None:
    """Make the engines of ``rollout/`` known, by their names."""
    rooms = import_module("rlhf_mcore.rollout")
    for room in pkgutil.iter_modules(rooms.__path__):
        kind = getattr(import_module(f"{rooms.__name__}.{room.name}"), "KIND", None) if room.ispkg else None
        if kind is not None:
            ENGINES[kind.name] = kind


def engine_kind(name: str) -> EngineKind:
    """Return the declaration of an engine. A name that is no choice is validation's to refuse; until then it can do everything."""
    return ENGINES.get(name) or _load_installed(name) or EngineKind(name)


def is_engine(name: str) -> bool:
    """Return whether a name is an engine's."""
    return name in ENGINES or _load_installed(name) is not None


@cache
def _load_installed(name: str) -> EngineKind | None:
    """Return what an installed package declares under this name."""
    point = find_plugins("engines").get(name)
    kind: EngineKind | None = point.load() if point is not None else None
    return kind


def engine_packages() -> dict[str, tuple[str, ...]]:
    """Return the packages of engines, with their distributions; a machine has one of each."""
    return {package: names for kind in ENGINES.values() for package, names in kind.packages.items()}


def engines_that_read(key: str) -> str:
    """Name the engines that a key has an effect on, as ``only_with`` of its description."""
    return f"rollout.engine={' or '.join(kind.name for kind in ENGINES.values() if kind.reads(key))}"


discover()
