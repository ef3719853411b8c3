"""From ``actor.lora.sync`` to what is sent to engines: merged weights, or adapters beside weights that travel once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from rlhf_mcore.bridge.map.rules import Shapes, hf_shapes, part_of
from rlhf_mcore.bridge.run.merged import ADAPTERS, AdaptersAside, MergedSources, adapted_weights
from rlhf_mcore.config.implied import adapter_sizes, sends_adapters
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
from rlhf_mcore.roles.model import RoleModel


@dataclass(frozen=True, slots=True)
class Sent:
    """Name what a rank sends, see :class:`PlannedBridge`. ``kept`` is the same as it was when it was last taken."""

    parameters: Sequence[LocalParameter]
    sources: MergedSources | AdaptersAside
    kept: MergedSources | AdaptersAside
    adapter: AdapterSizes | None


def engine_adapters(cfg: Config, geometry: ModelGeometry) -> Shapes | None:
    """Return the names and shapes of the adapters that engines add themselves; None where they get merged weights."""
    if not sends_adapters(cfg, geometry):
        return None
    return hf_shapes(replace(geometry.trunk, adapter=adapter_sizes(cfg.actor.lora)))


def select_sent(cfg: Config, model: RoleModel) -> Sent:
    geometry = model.adapter_geometry
    assert geometry is not None
    weights, adapters = (
        part_of(model.local_parameters(), model.spec.geometry, model.spec.geometry.trunk),
        model.adapter_parameters(),
    )
    is_aside = sends_adapters(cfg, model.spec.geometry)
    if is_aside:
        aside, kept_aside = (AdaptersAside(weights, adapters, geometry, keep=keep) for keep in (False, True))
        return Sent([*weights, *adapters], aside, kept_aside, model.adapter)
    gains = _gains_of(model) if geometry.adapter is not None and geometry.adapter.use_dora else None
    merged, kept = (MergedSources(weights, adapters, geometry, keep=keep, gains=gains) for keep in (False, True))
    return Sent(weights, merged, kept, None)


def _gains_of(model: RoleModel) -> Callable[[], Mapping[str, Tensor]]:
    """Return a function that computes what the rows of this rank's weights are multiplied by, with DoRA."""
    from rlhf_mcore.mcore.dora import gains

    return partial(gains, [] if model.model is None else model.model.chunks)


def changed_names(cfg: Config, model: RoleModel) -> Sequence[str]:
    """Name what changes from one sync to the next, for ``sync(only=...)``."""
    assert model.adapter_geometry is not None
    return ADAPTERS if sends_adapters(cfg, model.spec.geometry) else adapted_weights(model.adapter_geometry)
