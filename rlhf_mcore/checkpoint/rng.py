"""Save and restore the random generators of each rank as tensors: Python, numpy, and torch on host and device.

The states are stored in a file of tensors, without pickle.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

from rlhf_mcore.checkpoint.layout import RNG_FILE
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.parallel.collectives import gather_bytes


def seed_process(seed: int, rank: int) -> None:
    """Seed a rank's Python, numpy and torch generators from the run's seed and the rank."""
    python, legacy, torchs = (int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3))
    random.seed(python)
    np.random.seed(legacy)
    torch.manual_seed(torchs)


def capture() -> dict[str, Tensor]:
    """Return the states of this process's generators by name."""
    version, words, gauss = random.getstate()
    assert version == 3, version
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy.keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy.place": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        "torch.cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["torch.cuda"] = torch.cuda.get_rng_state()
    return states


def gather_states(states: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the states of all ranks on the first rank, as ``rank-<r>/<name>``, and None on the others.

    This is a collective call over the world.
    """
    parts = gather_bytes(save(dict(states)))
    if dist.get_rank() != 0:
        return None
    return {f"rank-{rank}/{name}": tensor for rank, part in enumerate(parts) for name, tensor in load(part).items()}


def encode(states: Mapping[str, Tensor]) -> bytes:
    """Return the content of ``rng.safetensors``."""
    return save(dict(states), metadata={"format": "pt"})


def restore(states: Mapping[str, Tensor]) -> None:
    """Set this process's generators to the states of :func:`capture`.

    A GPU generator is unchanged if ``states`` has none.
    """
    random.setstate(_python_state(states))
    np.random.set_state(_numpy_state(states))
    torch.set_rng_state(states["torch.cpu"])
    if "torch.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["torch.cuda"])


def read_states(directory: Path, rank: int, world_size: int) -> dict[str, Tensor] | None:
    """Read the states of a rank. Return None if a different number of ranks wrote the file.

    Raises:
        ConfigError: the file cannot be read, or does not contain generator states.
    """
    by_rank = _read_by_rank(directory)
    return by_rank[f"rank-{rank}"] if by_rank.keys() == {f"rank-{r}" for r in range(world_size)} else None


def check_states(directory: Path) -> None:
    """Check that generators accept the states in the file.

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
                f"{path}: {rank} has no valid state of random generators ({error}); choose another checkpoint"
            ) from error
    return by_rank


def _python_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    gauss = states["python.gauss"].tolist()
    return 3, tuple(states["python.words"].tolist()), gauss[0] if gauss else None


def _numpy_state(states: Mapping[str, Tensor]) -> tuple[Any, ...]:
    position, has_gauss = states["numpy.place"].tolist()
    keys = states["numpy.keys"].numpy().astype(np.uint32)
    return "MT19937", keys, position, has_gauss, float(states["numpy.gauss"])
