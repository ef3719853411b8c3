"""Sync all or some tensors into an engine in a world of one, and verify them. tests/e2e tests several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run.endpoints import EngineDestinations
from rlhf_mcore.bridge.run.stand_ins import ChangedOnlyBridge
from rlhf_mcore.bridge.run.sync import EngineWeights, PlannedBridge, SentWeights, SyncOptions
from rlhf_mcore.geometry import LocalParameter, ModelGeometry, Shard
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.protocols import SyncMismatch
from tests.messages import refused
from tests.unit.bridge.engine import Engine
from tests.unit.bridge.geometry import GEOMETRY, hf_tensors, mcore_tensors
from tests.unit.pairs import each_value

pytestmark = pytest.mark.usefixtures("world")
TIED = replace(GEOMETRY, tied_embeddings=True)


class Trainer:
    """The tensors of a model as Megatron stores them on one rank."""

    def __init__(self, geometry: ModelGeometry):
        self.geometry, self.hf = geometry, hf_tensors(geometry)
        self.parameters = [LocalParameter(n, t, Shard(0, 1)) for n, t in self._cut().items()]

    def _cut(self) -> dict[str, Tensor]:
        held = mcore_tensors(self.geometry, self.hf, 0, 1)
        if self.geometry.tied_embeddings:
            del held["output_layer.weight"]
        return held

    def update(self) -> None:
        """Change all weights."""
        self.hf = {name: tensor + 0.5 for name, tensor in self.hf.items()}
        for parameter, tensor in zip(self.parameters, self._cut().values(), strict=True):
            parameter.tensor.copy_(tensor)

    def bridge(self, engine: Engine, **options: Any) -> PlannedBridge:
        sent = SentWeights(self.parameters, self.geometry)
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


@each_value(
    ("verify", [False, True]),
    (
        "only, brought",
        [
            (["model.norm.weight"], {"model.norm.weight"}),
            (["model.layers.1.self_attn.[qk]_proj.bias"], {f"model.layers.1.self_attn.{x}_proj.bias" for x in "qk"}),
            (
                ["model.layers.0.mlp.*", "model.norm.weight"],
                {"model.norm.weight", *(f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))},
            ),
        ],
    ),
)
def test_a_sync_of_some_tensors_leaves_the_others(
    trainer: Trainer, only: list[str], brought: set[str], verify: bool
) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine, verify=verify)
    whole = bridge.sync(0)
    old = trainer.hf
    trainer.update()
    part = bridge.sync(1, only=only)
    assert engine.policy_version == 1
    for name, tensor in engine.tensors.items():
        assert torch.equal(tensor, (trainer.hf if name in brought else old)[name]), name
    assert part.local_bytes == sum(old[name].numel() * 8 for name in brought) < whole.local_bytes
    assert bridge.sync(2).local_bytes == whole.local_bytes
    assert all(torch.equal(tensor, trainer.hf[name]) for name, tensor in engine.tensors.items())


def test_trained_weights_travel_alone_to_an_engine_that_has_the_others(trainer: Trainer) -> None:
    engine = engine_of(trainer)
    bridge = ChangedOnlyBridge(trainer.bridge(engine).sync, engine, ["model.norm.weight"])
    sent = []
    for version in range(4):
        sent.append(bridge.sync(version).local_bytes)
        if version == 1:
            engine.abandon("it slept")
    assert sent[0] == sent[2] and sent[1] == sent[3] == 8 * trainer.hf["model.norm.weight"].numel()


def test_tied_weights_have_two_names_for_one_tensor() -> None:
    tied, engines = Trainer(TIED), []
    for only in (["lm_head.weight"], ["model.embed_tokens.weight"], ["*e*_*.weight"]):
        engine = engine_of(tied)
        bridge = tied.bridge(engine)
        bridge.sync(0)
        tied.update()
        bridge.sync(1, only=only)
        engines.append(engine)
        assert torch.equal(engine.tensors["model.embed_tokens.weight"], tied.hf["model.embed_tokens.weight"])
    with refused(ValueError, field="'lm_head.bias'"):
        bridge.sync(2, only=["lm_head.bias"])


def test_some_tensors_cannot_be_added_to_nothing(trainer: Trainer) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine)
    with pytest.raises(RuntimeError, match="no complete weights"):
        bridge.sync(0, only=["model.norm.weight"])
    bridge.sync(0)
    engine.abandon("it slept")
    with pytest.raises(RuntimeError, match="no complete weights"):
        bridge.sync(1, only=["model.norm.weight"])


@pytest.mark.parametrize(
    ("only", "message"), [(["model.nrm.weight"], "'model.nrm.weight' matches no"), ([], "names no")]
)
def test_names_that_mean_nothing_are_refused(trainer: Trainer, only: list[str], message: str) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine)
    bridge.sync(0)
    with pytest.raises(ValueError, match=message):
        bridge.sync(1, only=only)
    assert engine.policy_version == 0, "nothing was touched"


def tamper(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Change the lowest bit of one element in transit."""
    close = EngineDestinations.close

    def tampered(landing: EngineDestinations, bucket: Bucket) -> None:
        if name in bucket.destination_buffers:
            landing.open(bucket)[name].view(torch.int64)[-1] ^= 1
        close(landing, bucket)

    monkeypatch.setattr(EngineDestinations, "close", tampered)


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
