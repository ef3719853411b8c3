"""The random generators of every rank as tensors: Python's, numpy's, torch's on the host and on the device, and further ones.

They are state like any other, so they go into a file of tensors; nothing of Python's own pickled state is kept.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

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
    """Start Python's, numpy's and torch's generators of a rank from the run's seed, each rank's at another place."""
    python, legacy, torchs = (int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3))
    random.seed(python)
    np.random.seed(legacy)
    torch.manual_seed(torchs)


def capture() -> dict[str, Tensor]:
    """The state of this process's generators, by name."""
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


def restore(states: Mapping[str, Tensor]) -> None:
    """Set this process's generators to what :func:`capture` has found. A GPU's is left alone where the file has none."""
    gauss = states["python.gauss"].tolist()
    random.setstate((3, tuple(states["python.words"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = states["numpy.place"].tolist()
    keys = states["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(states["numpy.gauss"])))
    torch.set_rng_state(states["torch.cpu"])
    if "torch.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["torch.cuda"])


def gather_states(mine: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The states of all ranks on the first one, as ``rank-<r>/<name>``; None on the others. Collective over the world."""
    parts = gather_bytes(save(dict(mine)))
    if dist.get_rank() != 0:
        return None
    return {f"rank-{rank}/{name}": tensor for rank, part in enumerate(parts) for name, tensor in load(part).items()}


def encode(states: Mapping[str, Tensor]) -> bytes:
    """The content of ``rng.safetensors``."""
    return save(dict(states), metadata={"format": "pt"})


def read_states(directory: Path, rank: int, world_size: int) -> dict[str, Tensor] | None:
    """What a rank had, or None when the file was written by another number of ranks: then there is nothing to go on with.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        held = load_file(directory / RNG_FILE)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{directory / RNG_FILE}: not a readable safetensors file ({error})") from error
    if {name.split("/", 1)[0] for name in held} != {f"rank-{r}" for r in range(world_size)}:
        return None
    prefix = f"rank-{rank}/"
    return {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
