"""Two engines. The second samples longer than the deadline of a collective. Each rank writes its observations."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.parallel.collectives import SharedProgress, all_gather_json
from rlhf_mcore.protocols import EngineRank, PeersLost
from rlhf_mcore.rollout.engine import Engine, VersionedWeights
from rlhf_mcore.trainer.batches import BatchSampler
from rlhf_mcore.types import Completion, Prompt, Request, Sampling
from tests.episodes import sample_rollouts

LIMIT_S = 2  # deadline of a collective, and of sampling without progress
STEP_S = 0.25


class SlowEngine(Engine):
    """An engine that samples one token per step. A ``stuck`` engine samples none until the other rank has given up."""

    def __init__(self, rank: int, stuck: bool) -> None:
        VersionedWeights.__init__(self)
        self.rank, self._max_model_len, self._at_publish = EngineRank(rank, 2), 100, "continue"
        self._in_flight, self._finished, self._tokens_of_finished = {}, [], 0
        self._counts: dict[int, int] = {}
        self._begins_at = time.monotonic() + (3 * LIMIT_S if stuck else 0)
        self.commit_load(0)

    def _begin(self, requests: Sequence[Request], limits: Sequence[int]) -> list[str]:
        self._counts |= {request.request_id: 0 for request in requests}
        return [request.name for request in requests]

    def _step(self) -> list[Completion]:
        time.sleep(STEP_S)
        if time.monotonic() < self._begins_at:
            return []
        self._counts = {number: count + 1 for number, count in self._counts.items()}
        done = [n for n, count in self._counts.items() if count == self._in_flight[n].request.sampling.max_new_tokens]
        for number in done:
            del self._counts[number]
        return [Completion(n, np.zeros(1, np.int32), np.zeros(1, np.float32), ((0, 0),), "stop") for n in done]

    def _end(self, request_ids: Sequence[int]) -> None: ...

    def _num_sampled(self) -> dict[int, int]:
        return dict(self._counts)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None: ...

    def close(self) -> None: ...


def sample(rank: int, stuck: bool) -> tuple[str, int]:
    """Sample two prompts; the second takes at least 4 s. Returns the error, and the number of watchdog notifications."""
    beats: list[Any] = []
    progress = SharedProgress(LIMIT_S, lambda: beats.append(1))
    engine = SlowEngine(rank, stuck and rank == 1)
    engine.on_progress = progress.note
    sampler = BatchSampler(engine, engine.rank, lambda responses: [""] * len(responses), wait=progress.wait)
    prompts = [Prompt(str(number), number, [1], "text") for number in range(2)]
    sampling = Sampling(max_new_tokens=int(4 / STEP_S) if rank and not stuck else 1)
    try:
        sample_rollouts(sampler, prompts, sampling, step=1)
    except PeersLost as error:
        return str(error), len(beats)
    return "", len(beats)


def main(directory: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    rank = int(os.environ["RANK"])
    findings = {"late": all_gather_json(sample(rank, stuck=False))}
    began = time.monotonic()
    problem = sample(rank, stuck=True)
    findings["stuck"] = [problem, time.monotonic() - began]
    if rank == 0:
        (directory / "findings.json").write_text(json.dumps(findings))
        time.sleep(4 * LIMIT_S)  # until the other rank has ended
