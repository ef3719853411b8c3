"""Weights over the bridge to real engines under a real Ray, one of which is killed or stopped in the middle of a transfer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from rlhf_mcore.bridge.run.endpoints import EngineDestinations
from rlhf_mcore.bridge.run.remote import BridgeJob, EngineEnd, RemoteBridge, Side
from rlhf_mcore.bridge.run.sync import NoTarget
from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.geometry import LocalParameter, Shard
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.addresses import LOOPBACK
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.protocols import SyncStats
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.remote.fleet import Fleet
from rlhf_mcore.sampling.rollouts import request_of
from tests.commands import wait_for
from tests.e2e.remote.fleets import MAX_MODEL_LEN, jobs, plan, running
from tests.e2e.rollout.tiny import save_model
from tests.unit.bridge.geometry import mcore_tensors
from tests.unit.parallel.world import world

__all__ = ["world"]

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
TIMEOUT_S = 15.0  # a busy machine may keep an engine that is well waiting for seconds


class TroubledEnd(EngineEnd):
    """The first that finds a file named after a signal in ``folder`` sends it to itself in the third bucket of a transfer."""

    def __init__(self, folder: str, target: Any) -> None:
        super().__init__(target)
        self._folder = Path(folder)

    def sync(self, version: int) -> SyncStats:
        open_bucket = EngineDestinations.open

        def signal_and_open(destinations: EngineDestinations, bucket: Any) -> Any:
            for number in SIGNALS if bucket.index == 2 else ():
                try:
                    (self._folder / str(int(number))).unlink()
                except FileNotFoundError:
                    continue
                os.kill(os.getpid(), number)
            return open_bucket(destinations, bucket)

        with mock.patch.object(EngineDestinations, "open", signal_and_open):
            return super().sync(version)


@dataclass(slots=True)
class Setting:
    """A trainer of one rank, which is this process, two engines of their own, and one in this process."""

    folder: Path
    hf: dict[str, torch.Tensor]
    held: dict[str, torch.Tensor]
    fleet: Fleet
    bridge: RemoteBridge
    reference: Any
    notes: list[str]

    def train(self) -> None:
        """Change the weights, in Megatron's tensors and in Hugging Face's."""
        for tensors in (self.hf, self.held):
            for tensor in tensors.values():
                tensor *= 1.1

    def sample_both(self) -> list[list[list[int]]]:
        """Return the tokens of the fleet, and of the engine in this process with the trainer's weights."""
        self.reference.load_weights(iter(self.hf.items()), version=1)
        wanted = jobs(6, 1, 12, temperature=0.0)
        drawn = [future.result(600) for future in self.fleet.begin(wanted)]
        here = self.reference.generate([request_of(job) for job in wanted])
        return [[found.sampled_ids.tolist() for found in drawn], [found.token_ids.tolist() for found in here]]


@pytest.fixture
def setting(world: None, tmp_path: Path) -> Iterator[Setting]:
    directory = tmp_path / "model"
    directory.mkdir()
    save_model(directory, "qwen3", seed=1)
    geometry, hf = load_spec(directory).geometry, load_file(directory / "model.safetensors")
    held = mcore_tensors(geometry, hf, 0, 1)
    side = Side([LocalParameter(name, tensor, Shard(0, 1)) for name, tensor in held.items()], NoTarget())
    made = plan(directory, num_engines=2, timeout_s=TIMEOUT_S)
    made = replace(made, order=replace(made.order, receiver=partial(TroubledEnd, str(tmp_path))))
    model = EngineModel(str(directory), str(directory), "fp32", MAX_MODEL_LEN, seed=0)
    reference = build_engine(RolloutConfig(engine="hf"), model)
    with running(made) as (fleet, notes):
        job = BridgeJob(geometry, 20_000, verify=True)
        bridge = RemoteBridge(side, job, world_group(), fleet, address=LOOPBACK, timeout_s=TIMEOUT_S)
        yield Setting(tmp_path, hf, held, fleet, bridge, reference, notes)
        bridge.leave()


def test_fault_20_an_engine_that_is_lost_in_a_transfer_is_replaced_and_all_get_whole_weights(
    setting: Setting,
) -> None:
    """Killed, then stopped; in both cases the other engine has the weights when the transfer returns."""
    setting.bridge.sync(0)
    said, expected = setting.sample_both()
    assert said == expected
    version = 0
    for number in SIGNALS:
        setting.train()
        (setting.folder / str(int(number))).touch()
        version += 1
        setting.bridge.sync(version)
        assert not (setting.folder / str(int(number))).exists()
        assert sum("failed" in note for note in setting.notes) == SIGNALS.index(number) + 1, setting.notes
        said, expected = setting.sample_both()
        assert said == expected
        wait_for(lambda: "ready" in [engine.state for engine in setting.fleet.status()])
        version += 1
        setting.bridge.sync(version)  # the other one comes back with whole weights
        assert [engine.state for engine in setting.fleet.status()] == ["serving"] * 2
        said, expected = setting.sample_both()
        assert said == expected
