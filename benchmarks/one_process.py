"""A whole GRPO run in this process, step by step: one rank with vLLM, on a small random model."""

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
    """A run's configuration, in a folder of its own with what it names."""
    with TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, OMP_NUM_THREADS="1"):
        make(Path(folder), row)
        keys = our_command(row, steps, ["trainer.world_size=1", "logging.console=off", *overrides])
        keys = keys[keys.index("experiment=ours") :]
        yield rm.load_config(str(ROOT / "configs" / "quickstart" / "grpo.yaml"), keys)


@contextmanager
def trainer_of(row: Row, steps: int, overrides: Sequence[str] = ()) -> Iterator[rm.Trainer]:
    """A trainer before its first step, as a user has it."""
    with _config_of(row, steps, overrides) as cfg, rm.Trainer(cfg) as trainer:
        yield trainer


@contextmanager
def loop_of(row: Row, steps: int, overrides: Sequence[str] = ()) -> Iterator[TrainingLoop]:
    """The loop of a run before its first step, whose parts can be exchanged."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": "29500"}  # not opened
    with _config_of(row, steps, overrides) as cfg:
        checked = rm.Trainer(cfg).cfg  # as a world of one takes it
        with patch.dict(os.environ, {**alone, **address}), open_run(checked) as run:
            assert run.trainer is not None
            run.trainer.begin(steps)
            yield run.trainer
