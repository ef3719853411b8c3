"""Declarations of the inference engines. Only this module looks up ``rollout.engine``.

An engine declares a ``KIND`` in its folder of ``rollout/``. An installed package declares it by an entry point in the group
``rlhf_mcore.engines``. A declaration imports neither torch nor the engine's libraries.
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
    from rlhf_mcore.config.schema import ModelConfig, RolloutConfig
    from rlhf_mcore.geometry import ModelGeometry
    from rlhf_mcore.rollout.engine import AnyEngine, EngineModel

SEQUENCES = 256  # default number of sequences that an engine decodes at once


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Capabilities of an engine, and its construction in a rank."""

    name: str  # the value of rollout.engine
    packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # imported package: its distributions
    runs_apart: bool = True  # its ranks may be Ray processes with separate devices
    is_sharded: bool = False  # several ranks form one engine; otherwise each rank holds a whole model
    # How weights are written. "loaders": the model's own loaders split tensors in the rank's process, and the bridge traces them.
    # "plain": the rank's parameters have Hugging Face's names and shapes. "full": a call sends full tensors to other processes
    weights: Literal["loaders", "plain", "full"] = "plain"
    records_routes: bool = False  # completions can contain the experts of each token
    sleeps: bool = False  # frees its device memory while the trainer runs
    reserves_cache: bool = False  # reserves the cache at the start; otherwise it grows with the running sequences
    temperatures: tuple[float, float] = (0.0, math.inf)  # lowest and highest temperature besides 0
    attention_kernels: tuple[str, ...] = ()  # supported values of model.attention
    holds_8_bits: bool = (
        False  # stores 8-bit weights on CUDA (rollout.quantization); otherwise their values in the model's dtype
    )
    own_keys: tuple[str, ...] = ()  # keys or groups that this engine reads and some others do not

    @property
    def has_live_weights(self) -> bool:
        """Return whether a bridge writes its parameters in the rank's process."""
        return self.weights != "full"

    def reads(self, key: str) -> bool:
        """Return whether this engine reads a key that some engines do not read."""
        return any(key == own or key.startswith(f"{own}.") for own in self.own_keys)

    def argument_problems(self, cfg: RolloutConfig) -> Iterator[str]:
        """List the problems of the keys that only this engine reads."""
        return iter(())

    def cache_width(self, cfg: RolloutConfig, model_width: int) -> int:
        """Return the bytes of a key or value in the cache. ``model_width``: bytes of a weight."""
        return model_width

    def default_sequences(self, memory_bytes: int, device: str) -> int:
        """Return the default of ``rollout.max_num_seqs`` on a device. ``memory_bytes``: 0 on a CPU. ``device``: its name."""
        return SEQUENCES

    def model_problems(
        self, cfg: RolloutConfig, model: ModelConfig, geometry: ModelGeometry, *, records_routes: bool
    ) -> Iterator[str]:
        """List why this engine cannot generate with the model on this machine. ``records_routes``: requests ask for routes."""
        return iter(())

    def adapter_problems(self, cfg: RolloutConfig, geometry: ModelGeometry) -> Iterator[str]:
        """List why this engine cannot add adapters to the weights itself. ``geometry`` includes the adapters."""
        yield f"rollout.engine={self.name} cannot add adapters; it receives whole weights with the adapters merged"

    def preload(self) -> None:
        """Import the modules that ``build`` needs on a CPU, before ranks are forked from this process."""

    def prepare_process(self, *, deterministic: bool) -> None:
        """Set the environment of the engine's libraries before ``build``, in a process without a trainer."""

    def joining(self) -> AbstractContextManager[Any]:
        """Return a context for creating communicators with processes that have not run ``prepare_process``."""
        return nullcontext()

    def build(self, cfg: RolloutConfig, model: EngineModel) -> AnyEngine:
        """Build the engine of this rank. Every rank calls it at the same time, with torch.distributed initialised.

        Raises:
            ConfigError: there is no such engine, or it cannot be built (see the constructors).
        """
        raise ConfigError(f"rollout.engine={self.name!r} is not an engine; choose one of: {', '.join(ENGINES)}")


ENGINES: dict[str, EngineKind] = {}


def discover() -> None:
    """Add the engines of ``rollout/`` to ``ENGINES``."""
    rollout = import_module("rlhf_mcore.rollout")
    for folder in pkgutil.iter_modules(rollout.__path__):
        kind = getattr(import_module(f"{rollout.__name__}.{folder.name}"), "KIND", None) if folder.ispkg else None
        if kind is not None:
            ENGINES[kind.name] = kind


def engine_kind(name: str) -> EngineKind:
    """Return the declaration of an engine. An unknown name has the defaults; validation rejects it."""
    return ENGINES.get(name) or _load_installed(name) or EngineKind(name)


def is_engine(name: str) -> bool:
    """Return whether there is an engine of this name."""
    return name in ENGINES or _load_installed(name) is not None


@cache
def _load_installed(name: str) -> EngineKind | None:
    """Return the declaration of an installed package, or None."""
    point = find_plugins("engines").get(name)
    kind: EngineKind | None = point.load() if point is not None else None
    return kind


def engine_packages() -> dict[str, tuple[str, ...]]:
    """Return the packages that engines import, each with the distributions that contain it."""
    return {package: names for kind in ENGINES.values() for package, names in kind.packages.items()}


def engines_that_read(key: str) -> str:
    """Return the condition of a key that only some engines read, for ``only_with`` of its description."""
    return f"rollout.engine={' or '.join(kind.name for kind in ENGINES.values() if kind.reads(key))}"


discover()
