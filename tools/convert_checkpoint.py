#!/usr/bin/env python
"""``rlhf-mcore convert`` from a checkout: ``python tools/convert_checkpoint.py --from fsdp --to hf SRC DST``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlhf_mcore.commands.convert.command import main

if __name__ == "__main__":
    sys.exit(main())
