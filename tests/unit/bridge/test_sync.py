"""Syncs into an engine in a world of one: of all tensors and of some, and the two ways to verify them. Ranks are in tests/e2e."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_mcore.bridge.files.transfer import Gatherer
from rlhf_mcore.bridge.run.sync import PlannedBridge
from rlhf_mcore.protocols import SyncMismatch
from rlhf_mcore.rollout.weights import VersionedWeights
from rlhf_mcore.types import LocalParameter, ModelGeometry, Shard
from tests.unit.bridge.geometry import GEOMETRY, hf_tensors, mcore_tensors

pytestmark = pytest.mark.usefixtures("world")
TIED = replace(GEOMETRY, tied_embeddings=True)


class Engine(VersionedWeights):
    """An engine whose model holds every Hugging Face tensor as it is."""

    def __init__(self, shapes: dict[str, torch.Size]):
        super().__init__()
        self.model = nn.Module()
        for name, shape in shapes.items():
            owner = self.model
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=torch.float64), requires_grad=False))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @contextmanager
    def begin(self, version: int) -> Iterator[nn.Module]:
        self.begin_load()
        yield self.model
        self.commit_load(version)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.begin_load()
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)
        self.commit_load(version)


class Trainer:
    """The tensors of a model, as Megatron holds them on one rank."""

    def __init__(self, geometry: ModelGeometry):
        self.geometry, self.hf = geometry, hf_tensors(geometry)
        self.parameters = [LocalParameter(n, t, Shard(0, 1)) for n, t in self._cut().items()]
        group = dist.group.WORLD
        assert group is not None
        self.gatherer = Gatherer(self.parameters, geometry, group, group)

    def _cut(self) -> dict[str, Tensor]:
        held = mcore_tensors(self.geometry, self.hf, 0, 1)
        if self.geometry.tied_embeddings:
            del held["output_layer.weight"]
        return held

    def update(self) -> None:
        """All weights change."""
        self.hf = {name: tensor + 0.5 for name, tensor in self.hf.items()}
        for parameter, tensor in zip(self.parameters, self._cut().values(), strict=True):
            parameter.tensor.copy_(tensor)

    def bridge(self, engine: Engine, **options: Any) -> PlannedBridge:
        return PlannedBridge(self.parameters, self.geometry, engine, bucket_bytes=256, poison=True, **options)  # type: ignore[arg-type]


@pytest.fixture(params=[GEOMETRY, TIED], ids=["untied", "tied"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    return Trainer(request.param)


def engine_of(trainer: Trainer) -> Engine:
    return Engine({name: tensor.shape for name, tensor in trainer.hf.items()})


@pytest.mark.parametrize("verify", ["off", "digest", "full"])
def test_a_whole_sync_replaces_everything(trainer: Trainer, verify: str) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine, verify=verify, gatherer=trainer.gatherer)
    for version in (0, 1):
        bridge.sync(version)
        assert engine.policy_version == version
        assert all(torch.equal(tensor, trainer.hf[name]) for name, tensor in engine.tensors.items())
        trainer.update()


@pytest.mark.parametrize("verify", ["off", "digest"])
@pytest.mark.parametrize(
    ("only", "brought"),
    [
        (["model.norm.weight"], {"model.norm.weight"}),
        (["model.layers.1.self_attn.[qk]_proj.bias"], {f"model.layers.1.self_attn.{x}_proj.bias" for x in "qk"}),
        (
            ["model.layers.0.mlp.*", "model.norm.weight"],
            {"model.norm.weight", *(f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))},
        ),
    ],
)
def test_a_sync_of_some_tensors_leaves_the_others(
    trainer: Trainer, only: list[str], brought: set[str], verify: str
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
    with pytest.raises(ValueError, match=r"'lm_head\.bias' matches no tensor"):
        bridge.sync(2, only=["lm_head.bias"])


def test_some_tensors_cannot_be_added_to_nothing(trainer: Trainer) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine)
    with pytest.raises(RuntimeError, match="no whole weights"):
        bridge.sync(0, only=["model.norm.weight"])
    bridge.sync(0)
    engine.abandon("it slept")
    with pytest.raises(RuntimeError, match="no whole weights"):
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


def tamper(bridge: PlannedBridge, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The lowest bit of one element changes on its way."""
    land = bridge._whole.executor._land

    def tampered(flight: Any, destinations: Any) -> None:
        land(flight, destinations)
        if name in flight.bucket.destination_buffers:
            bits = destinations.open(flight.bucket.index)[name].view(torch.int64)
            bits[-1] ^= 1

    monkeypatch.setattr(bridge._whole.executor, "_land", tampered)


@pytest.mark.parametrize(("verify", "named"), [("digest", "tensors differ"), ("full", "differ from a plain load")])
def test_a_changed_bit_is_noticed_and_nothing_is_generated(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, verify: str, named: str
) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine, verify=verify, gatherer=trainer.gatherer)
    tamper(bridge, monkeypatch, "model.layers.1.input_layernorm.weight")
    with pytest.raises(SyncMismatch, match=rf"{named}.*layers\.1\.input_layernorm"):
        bridge.sync(0)
    assert engine.policy_version == -1
    with pytest.raises(RuntimeError, match="cannot generate"):
        engine.require_weights()
    monkeypatch.undo()
    bridge.sync(1)
    engine.require_weights()


def test_full_verification_is_of_whole_syncs(trainer: Trainer) -> None:
    bridge = trainer.bridge(engine_of(trainer), verify="full", gatherer=trainer.gatherer)
    bridge.sync(0)
    with pytest.raises(ValueError, match="compares all weights"):
        bridge.sync(1, only=["model.norm.weight"])
