"""``-m rlhf_mcore.cli.train`` on a processor without AMX: vLLM takes its other kernels there, as on most processors and on GPUs."""

import sys

import torch

from rlhf_mcore.cli import rank, train

torch.cpu._is_amx_tile_supported = lambda: False  # what vLLM asks

if __name__ == "__main__":
    sys.exit(rank.run(train.main))
