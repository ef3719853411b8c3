"""Run ``rlhf-mcore doctor`` under your own launcher: ``torchrun ... -m rlhf_mcore.cli.doctor``."""

from __future__ import annotations

import sys

from rlhf_mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
