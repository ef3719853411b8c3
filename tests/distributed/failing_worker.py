"""A world in which one rank raises while the others wait for it."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if (directory / "kill").exists():
            os._exit(9)
        raise ValueError("the weights of layer 3 are gone")
    dist.barrier()
