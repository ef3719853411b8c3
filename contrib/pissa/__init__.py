"""PiSSA (Meng et al. 2024, arXiv 2404.02948): adapters that start with the principal singular vectors of the weights.

The functions here are the hook ``pissa`` of the group ``rlhf_mcore.adapters``. Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mcore.config.schema import ActorConfig, CriticConfig

if TYPE_CHECKING:
    from rlhf_mcore.geometry import LocalParameter, ModelGeometry


def list_problems(role: str, group: ActorConfig | CriticConfig) -> Iterator[str]:
    """List settings that PiSSA does not support, because half of each adapter is frozen. ``role``: the name of ``group``."""
    if group.lora.dropout:
        yield f"{role}.lora.init=pissa is not supported with {role}.lora.dropout={group.lora.dropout}; set that to 0"
    if group.lora.path is not None:
        yield f"{role}.lora.init=pissa has no effect with {role}.lora.path={group.lora.path}; remove one of them"
    if group.optimizer.weight_decay:
        yield (
            f"{role}.lora.init=pissa: {role}.optimizer.weight_decay={group.optimizer.weight_decay} would change the frozen half "
            "of the adapters; set it to 0"
        )


def initialize(
    parameters: Sequence[LocalParameter],
    geometry: ModelGeometry,
    base: str | Path,
    progress: Callable[[str], None],
    field: str,
) -> None:
    """Fill this rank's adapters from the weights of ``base``. Collective over the world.

    ``field``: the LoRA group of the configuration, for messages.
    """
    from rlhf_mcore_contrib.pissa.principal import begin_with_principal

    begin_with_principal(parameters, geometry, base, progress, field)
