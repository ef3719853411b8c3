"""A canary after every sync, with a scripted engine and a scripted actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_mcore.protocols import SyncMismatch
from rlhf_mcore.rollout.engine import VersionedWeights
from rlhf_mcore.trainer.publishers import TOLERANCE, Canary, canary_prompts
from rlhf_mcore.types import Completion, Request, Sampling, TrainBatch
from tests.unit.trainer.records import Streaming, batch_sampler

pytestmark = pytest.mark.usefixtures("world")


class Engine(Streaming, VersionedWeights):
    def __init__(self, logprobs: list[list[float]]):
        Streaming.__init__(self)
        VersionedWeights.__init__(self)
        self.logprobs = logprobs
        self.asked: list[tuple[float, int, list[Sequence[int]]]] = []
        self.commit_load(7)

    def draw(self, requests: Sequence[Request]) -> list[Completion]:
        self.require_weights()
        drawn = requests[0].sampling
        self.asked.append((drawn.temperature, drawn.max_new_tokens, [request.prompt_ids for request in requests]))
        return [
            Completion(
                request.request_id,
                np.arange(len(said), dtype=np.int32),
                np.array(said, np.float32),
                ((0, self.policy_version),),
                "length",
            )
            for request, said in zip(requests, self.logprobs, strict=True)
        ]


class Actor:
    """The logprob of token t of a response is -t times ``scale``. The first token is 0."""

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def compute_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        return -self.scale * batch.token_ids.float().masked_fill(~batch.loss_mask, -77.0)


def canary(logprobs: list[list[float]], tolerance: float, actor: Actor | None = None) -> tuple[Canary, Engine]:
    engine = Engine(logprobs)
    prompts, sampling = canary_prompts(2, 3, vocab_size=50), Sampling(temperature=0.7, max_new_tokens=4)
    target: Any = engine  # a canary only abandons its weights
    return Canary(batch_sampler(engine), target, actor or Actor(), prompts, sampling, tolerance), engine


def test_an_engine_that_agrees_is_used() -> None:
    which, engine = canary([[0.0, -1.0, -2.0], [0.0]], tolerance=1e-3)
    which.check(7)
    assert engine.policy_version == 7
    assert engine.asked == [(0.7, 4, [[3, 10, 17], [34, 41, 48]])]


@pytest.mark.parametrize("wrong", [-1.01, -1e30])
def test_one_that_does_not_is_never_used(wrong: float) -> None:
    # Mean difference of the first response: 0.01 / 2.
    which, engine = canary([[0.0, wrong], [0.0]], tolerance=4e-3)
    with pytest.raises(SyncMismatch, match="version 7"):
        which.check(7)
    with pytest.raises(RuntimeError, match=r"cannot generate.*version 7"):
        engine.require_weights()


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_trainer_that_computes_no_number_is_a_mismatch(scale: float) -> None:
    which, _ = canary([[0.0, -1.0], [0.0]], tolerance=1.0, actor=Actor(scale))
    with pytest.raises(SyncMismatch, match="version 7"):
        which.check(7)


def test_differences_within_the_tolerance_are_rounding() -> None:
    which, engine = canary([[0.0, -1.01], [0.0]], tolerance=6e-3)
    which.check(1)
    engine.require_weights()


def test_coarser_dtypes_are_given_more_room() -> None:
    assert TOLERANCE[torch.float32] < TOLERANCE[torch.float16] < TOLERANCE[torch.bfloat16]
