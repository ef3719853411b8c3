"""Run ``rlhf-mcore evaluate`` under your own launcher: ``torchrun ... -m rlhf_mcore.cli.evaluate``."""

from __future__ import annotations

import sys

from rlhf_mcore.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
