"""Commands as a user starts them, in a directory whose temporary folder shows what a kill leaves there."""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes import ROOT


def environment(directory: Path) -> dict[str, str]:
    """With a temporary folder of its own, so that what a kill leaves there is seen."""
    (directory / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(directory / "tmp")}


def left_behind(directory: Path) -> list[str]:
    """What kills have left in the temporary folder, but for torch's cache of compiled code, which the next run uses."""
    return [path.name for path in (directory / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
