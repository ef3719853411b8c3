"""Data sets of other shapes -> train.parquet and eval.parquet: see ``--help`` and docs/data.md."""

import sys

from rlhf_mcore.cli.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
