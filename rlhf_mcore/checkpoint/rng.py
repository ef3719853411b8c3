"""The states of each rank's random generators as tensors: Python's, numpy's, and torch's on the host and on the device.

They are saved in a file of tensors, so nothing is pickled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from rlhf_mcore.parallel.collectives import gather_bytes


def seed_process(seed: int, rank: int) -> None:
    """Seed a rank's Python, numpy and torch generators from the run's seed and the rank."""
    python, legacy, torchs = (int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3))
    random.seed(python)
    np.random.seed(legacy)
    torch.manual_seed(torchs)


def capture() -> dict[str, Tensor]:
    """Return the state of this process's generators, by name."""
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
    """Return the states of all ranks on the first one, as ``rank-<r>/<name>``; None on the others. Collective over the world."""
    parts = gather_bytes(save(dict(states)))
    if dist.get_rank() != 0:
        return None
    return {f"rank-{rank}/{name}": tensor for rank, part in enumerate(parts) for name, tensor in load(part).items()}


def encode(states: Mapping[str, Tensor]) -> bytes:
    """Return the content of ``rng.safetensors``."""
    return save(dict(states), metadata={"format": "pt"})
