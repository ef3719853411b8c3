"""Megatron's own random generators, which give tensor-parallel ranks different numbers where they must differ."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

_PREFIX = "megatron."


def tracker_states() -> dict[str, Tensor]:
    """States of the tracked generators by name, uint8."""
    return {_PREFIX + name: state for name, state in get_cuda_rng_tracker().get_states().items()}


def set_tracker_states(states: Mapping[str, Tensor]) -> None:
    """Restore what :func:`tracker_states` has found; other names are passed over."""
    mine = {name.removeprefix(_PREFIX): state for name, state in states.items() if name.startswith(_PREFIX)}
    get_cuda_rng_tracker().set_states(mine)
