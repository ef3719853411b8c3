"""Data sets of other shapes -> train.parquet and eval.parquet: see ``--help`` and docs/data.md."""

import sys

from rlhf_mcore.commands.prepare_data.command import main

if __name__ == "__main__":
    sys.exit(main())
