"""Sync all or some tensors into an engine in a world of one, and verify them. tests/e2e tests several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run.endpoints import EngineDestinations
from rlhf_mcore.bridge.run.sync import EngineWeights, PlannedBridge, SentWeights, SyncOptions
from rlhf_mcore.geometry import LocalParameter, ModelGeometry, Shard
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.protocols import SyncMismatch
from tests.unit.bridge.engine import Engine
from tests.unit.bridge.geometry import GEOMETRY, hf_tensors, mcore_tensors

pytestmark = pytest.mark.usefixtures("world")
TIED = replace(GEOMETRY, tied_embeddings=True)


class Trainer:
    """The tensors of a model as Megatron stores them on one rank."""

    def __init__(self, geometry: ModelGeometry):
        self.geometry, self.hf = geometry, hf_tensors(geometry)
        self.parameters = [LocalParameter(n, t, Shard(0, 1)) for n, t in self._fuse().items()]

    def _fuse(self) -> dict[str, Tensor]:
        held = mcore_tensors(self.geometry, self.hf, 0, 1)
        if self.geometry.tied_embeddings:
            del held["output_layer.weight"]
        return held

    def update(self) -> None:
        """Change all weights."""
        self.hf = {name: tensor + 0.5 for name, tensor in self.hf.items()}
        for parameter, tensor in zip(self.parameters, self._fuse().values(), strict=True):
            parameter.tensor.copy_(tensor)

    def bridge(self, engine: Engine, changing: list[str] | None = None, **options: Any) -> PlannedBridge:
        sent = SentWeights(self.parameters, self.geometry, changing=changing)
        weights = EngineWeights(engine, poison=True)  # type: ignore[arg-type]
        return PlannedBridge(sent, weights, world_group(), SyncOptions(256, **options))


@pytest.fixture(params=[GEOMETRY, TIED], ids=["untied", "tied"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    return Trainer(request.param)


def engine_of(trainer: Trainer) -> Engine:
    return Engine({name: tensor.shape for name, tensor in trainer.hf.items()})


@pytest.mark.parametrize("verify", [False, True])
def test_a_whole_sync_replaces_everything(trainer: Trainer, verify: bool) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine, verify=verify)
    for version in (0, 1):
        bridge.sync(version)
        assert engine.policy_version == version
        assert all(torch.equal(tensor, trainer.hf[name]) for name, tensor in engine.tensors.items())
        trainer.update()


@pytest.mark.parametrize("verify", [False, True])
def test_weights_that_change_travel_alone_to_an_engine_that_has_the_others(trainer: Trainer, verify: bool) -> None:
    engine = engine_of(trainer)
    changing = {"model.norm.weight", *(f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))}
    bridge = trainer.bridge(engine, verify=verify, changing=sorted(changing))
    whole, expected = sum(8 * tensor.numel() for tensor in trainer.hf.values()), dict(trainer.hf)
    part = sum(8 * trainer.hf[name].numel() for name in changing)
    assert part < whole
    for version, num_bytes in enumerate([whole, part, part, whole, part]):
        if version == 3:
            engine.abandon("it slept")
        assert bridge.sync(version).local_bytes == num_bytes
        expected |= trainer.hf if num_bytes == whole else {name: trainer.hf[name] for name in changing}
        assert engine.policy_version == version
        assert [name for name, tensor in engine.tensors.items() if not torch.equal(tensor, expected[name])] == []
        trainer.update()


def test_another_bridge_may_have_sent_the_other_weights(trainer: Trainer) -> None:
    engine, name = engine_of(trainer), "model.norm.weight"
    trainer.bridge(engine).sync(0)
    assert trainer.bridge(engine, changing=[name]).sync(1).local_bytes == 8 * trainer.hf[name].numel()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weights_have_two_names_for_one_tensor(name: str) -> None:
    tied = Trainer(TIED)
    engine = engine_of(tied)
    bridge = tied.bridge(engine, changing=[name])
    bridge.sync(0)
    tied.update()
    bridge.sync(1)
    assert torch.equal(engine.tensors["model.embed_tokens.weight"], tied.hf["model.embed_tokens.weight"])


def tamper(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Change the lowest bit of one element in transit."""
    close = EngineDestinations.close

    def change_bit(landing: EngineDestinations, bucket: Bucket) -> None:
        if name in bucket.destination_buffers:
            landing.open(bucket)[name].view(torch.int64)[-1] ^= 1
        close(landing, bucket)

    monkeypatch.setattr(EngineDestinations, "close", change_bit)


def test_a_changed_bit_is_noticed_and_nothing_is_generated(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine, verify=True)
    tamper(monkeypatch, "model.layers.1.input_layernorm.weight")
    with pytest.raises(SyncMismatch, match=r"tensors differ.*layers\.1\.input_layernorm"):
        bridge.sync(0)
    assert engine.policy_version == -1
    with pytest.raises(RuntimeError, match="cannot generate"):
        engine.require_weights()
    monkeypatch.undo()
    bridge.sync(1)
    engine.require_weights()
