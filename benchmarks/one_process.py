"""Run GRPO step by step in this process: one rank with vLLM and a small random model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import rlhf_mcore as rm
from benchmarks.vs_trl import ROOT, Row, make, our_command
from rlhf_mcore.cli.compose import open_run
from rlhf_mcore.config.schema import Config
from rlhf_mcore.parallel.addresses import LOOPBACK
from rlhf_mcore.trainer.loop import TrainingLoop


@contextmanager
def _config_of(row: Row, steps: int, overrides: Sequence[str]) -> Iterator[Config]:
    """Return the configuration of a run, in a new folder with its files."""
    with TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, OMP_NUM_THREADS="1"):
        make(Path(folder), row)
        keys = our_command(row, steps, ["trainer.world_size=1", "logging.console=off", *overrides])
        keys = keys[keys.index("experiment=ours") :]
        yield rm.load_config(str(ROOT / "configs" / "quickstart" / "grpo.yaml"), keys)


@contextmanager
def trainer_of(row: Row, steps: int, overrides: Sequence[str] = ()) -> Iterator[rm.Trainer]:
    """Return a trainer before its first step, as in the Python API."""
    with _config_of(row, steps, overrides) as cfg, rm.Trainer(cfg) as trainer:
        yield trainer


@contextmanager
def loop_of(row: Row, steps: int, overrides: Sequence[str] = ()) -> Iterator[TrainingLoop]:
    """Return the loop of a run before its first step. Its parts can be replaced."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "29500"}  # the port is not opened
    with _config_of(row, steps, overrides) as cfg:
        checked = rm.Trainer(cfg).cfg  # resolved for a world of one rank
        with patch.dict(os.environ, {**alone, **address}), open_run(checked) as run:
            assert run.trainer is not None
            run.trainer.begin(steps)
            yield run.trainer
