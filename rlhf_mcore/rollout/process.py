"""Set up the process for engines of any kind."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

DEBUG_VARIABLE = "RLHF_MCORE_DEBUG"  # set: libraries log as they like


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Leave the process's random number generators (Python, NumPy, torch on every device) as they were found."""
    import numpy as np
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
