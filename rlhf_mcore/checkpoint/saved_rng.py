"""Reads the states of random generators in a checkpoint, checks them, and sets this process's generators to them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlhf_mcore.checkpoint.layout import RNG_FILE
from rlhf_mcore.config.errors import ConfigError


def restore(states: Mapping[str, Tensor]) -> None:
    """Set this process's generators to the states of :func:`capture`. A GPU's is left alone if ``states`` has none."""
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))
    torch.set_rng_state(states["torch.cpu"])
    if "torch.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["torch.cuda"])


def read_states(directory: Path, rank: int, world_size: int) -> dict[str, Tensor] | None:
    """Read the states of a rank. Returns None when the file was written by another number of ranks.

    Raises:
        ConfigError: the file cannot be read, or holds no states of generators.
    """
    by_rank = _read_by_rank(directory)
    return by_rank[f"rank-{rank}"] if by_rank.keys() == {f"rank-{r}" for r in range(world_size)} else None


def check_states(directory: Path) -> None:
    """Check that generators can be set to the states in the file.

    Raises:
        ConfigError: as ``read_states``.
    """
    _read_by_rank(directory)


def _read_by_rank(directory: Path) -> dict[str, dict[str, Tensor]]:
    path, by_rank = directory / RNG_FILE, dict[str, dict[str, Tensor]]()
    try:
        for name, tensor in load_file(path).items():
            rank, _, generator = name.partition("/")
            by_rank.setdefault(rank, {})[generator] = tensor
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); choose another checkpoint") from error
    for rank, states in by_rank.items():
        try:
            random.Random().setstate(_python_state(states))
            np.random.RandomState().set_state(_numpy_state(states))
            torch.Generator().set_state(states["torch.cpu"])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(
                f"{path}: {rank} holds no state of random generators ({error}); choose another checkpoint"
            ) from error
    return by_rank


def _python_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    gauss = states["python.gauss"].tolist()
    return 3, tuple(states["python.words"].tolist()), gauss[0] if gauss else None


def _numpy_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    position, has_gauss = states["numpy.place"].tolist()
    keys = states["numpy.keys"].numpy().astype(np.uint32)
    return "MT19937", keys, position, has_gauss, float(states["numpy.gauss"])
