"""A canary after every sync, with an engine and an actor that say what they are told to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_mcore.data.episodes import single_turn
from rlhf_mcore.protocols import SyncMismatch, SyncStats
from rlhf_mcore.rollout.weights import VersionedWeights
from rlhf_mcore.trainer.canary import TOLERANCE, CanaryBridge, canary_prompts
from rlhf_mcore.types import Prompt, Sampling, TrainBatch, Trajectory

pytestmark = pytest.mark.usefixtures("world")
STATS = SyncStats(1.0, 2, 3, 4)


class Engine(VersionedWeights):
    is_lead, num_engines, engine_index = True, 1, 0

    def __init__(self, logprobs: list[list[float]]):
        super().__init__()
        self.logprobs, self.asked = logprobs, []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        self.require_weights()
        self.asked.append((step, sampling.temperature, [p.prompt_ids for p in prompts]))
        return [
            single_turn(prompt, 0, list(range(len(said))), said, "", "length", self.policy_version)
            for prompt, said in zip(prompts, self.logprobs, strict=True)
        ]


class Bridge:
    def __init__(self, engine: Engine):
        self.engine = engine

    def sync(self, version: int) -> SyncStats:
        self.engine.commit_load(version)
        return STATS


class Actor:
    """Logprob of token t is -t, where the response begins with token 0."""

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return -batch.token_ids.float().masked_fill(~batch.loss_mask, -77.0)


def canary(logprobs: list[list[float]], tolerance: float) -> tuple[CanaryBridge, Engine]:
    engine = Engine(logprobs)
    bridge: Any = Bridge(engine)
    prompts, sampling = canary_prompts(2, 3, vocab_size=50), Sampling(temperature=0.7, max_new_tokens=4)
    return CanaryBridge(bridge, engine, Actor(), prompts, sampling, tolerance), engine  # type: ignore[arg-type]


def test_an_engine_that_agrees_is_used() -> None:
    bridge, engine = canary([[0.0, -1.0, -2.0], [0.0]], tolerance=1e-3)
    assert bridge.sync(4) is STATS
    assert engine.policy_version == 4
    assert engine.asked == [(4, 0.7, [[3, 10, 17], [34, 41, 48]])]


@pytest.mark.parametrize("wrong", [-1.01, float("nan"), float("inf")])
def test_one_that_does_not_is_never_used(wrong: float) -> None:
    # Mean difference of the first response: 0.01 / 2.
    bridge, engine = canary([[0.0, wrong], [0.0]], tolerance=4e-3)
    with pytest.raises(SyncMismatch, match="version 7"):
        bridge.sync(7)
    with pytest.raises(RuntimeError, match=r"cannot generate.*version 7"):
        engine.require_weights()


def test_differences_within_the_tolerance_are_rounding() -> None:
    bridge, engine = canary([[0.0, -1.01], [0.0]], tolerance=6e-3)
    assert bridge.sync(1) is STATS
    engine.require_weights()
    assert engine.policy_version == 1


def test_coarser_dtypes_are_given_more_room() -> None:
    assert TOLERANCE[torch.float32] < TOLERANCE[torch.float16] < TOLERANCE[torch.bfloat16]
