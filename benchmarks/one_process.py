"""A whole GRPO run in this process, step by step: one rank with vLLM, on a small random model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import rlhf_mcore as rm
from benchmarks.vs_trl import ROOT, Row, make, our_command


@contextmanager
def trainer_of(row: Row, steps: int, overrides: Sequence[str] = ()) -> Iterator[rm.Trainer]:
    """A trainer before its first step, in a folder of its own."""
    with TemporaryDirectory() as folder, chdir(folder):
        make(Path(folder), row)
        keys = our_command(row, steps, ["trainer.world_size=1", "logging.console=off", *overrides])
        keys = keys[keys.index("experiment=ours") :]
        os.environ["OMP_NUM_THREADS"] = "1"
        cfg = rm.load_config(str(ROOT / "configs" / "quickstart" / "grpo.yaml"), keys)
        with rm.Trainer(cfg) as trainer:
            yield trainer
