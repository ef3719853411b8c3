"""DoRA (Liu et al. 2024, arXiv 2402.09353): adapters with a trained magnitude for each output.

The functions here are the hook ``dora`` of the group ``rlhf_mcore.adapters``. Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.schema import ActorConfig, ActorLoraConfig, CriticConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
    from rlhf_mcore.mcore.lora import MatrixRows
    from rlhf_mcore_contrib.dora.magnitudes import Magnitudes


def list_problems(role: str, group: ActorConfig | CriticConfig) -> Iterator[str]:
    """List settings that DoRA does not support. ``role``: the name of ``group``."""
    key, lora = f"{role}.lora", group.lora
    if lora.dropout:
        yield f"{key}.use_dora=True is not supported with {key}.dropout={lora.dropout}; set that to 0"
    if lora.init == "pissa":
        yield f"{key}.use_dora=True is not supported with {key}.init=pissa; set that to gaussian"
    if isinstance(lora, ActorLoraConfig) and lora.sync == "adapter":
        yield f"{key}.use_dora=True: engines do not apply magnitudes, so {key}.sync=adapter is not possible; set that to merge"


def build_magnitudes(
    layer: Any, matrices: Sequence[MatrixRows], sizes: AdapterSizes, group: ProcessGroup | None
) -> Magnitudes:
    """Add magnitudes to a layer that already has A and B. ``group``: the ranks that split the layer's inputs, or None."""
    from rlhf_mcore_contrib.dora.magnitudes import Magnitudes

    return Magnitudes(layer, matrices, sizes, group)


def initialize(parameters: Iterable[LocalParameter], geometry: ModelGeometry, base: str | Path) -> None:
    """Fill this rank's magnitudes from the weights of ``base``."""
    from rlhf_mcore_contrib.dora.magnitudes import begin_with_norms

    begin_with_norms(parameters, geometry, base)


def compute_gains(chunks: Iterable[torch.nn.Module]) -> Mapping[str, Tensor]:
    """Return the factors for the rows of this rank's weights in a sync, by the weight's global name. Collective."""
    from rlhf_mcore_contrib.dora.magnitudes import gains

    return gains(chunks)
