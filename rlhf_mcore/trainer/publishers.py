"""The publishers send new weights to the engines. The canary then compares the engines with the trainer.

The canary is cheap (four tokens per engine). It detects errors that weight hashes cannot detect: kernels that read the wrong
weights, or memory that sleep mode did not restore. It detects large errors only; ``bridge.verify`` compares every bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.checkpoint.disk import SaveError
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.protocols import LogprobModel, ResponseSampler, SyncMismatch, WeightTarget
from rlhf_mcore.trainer.batches import Rollout, SampledBatch
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.protocols import Sleeper, SyncStats, WeightBridge
    from rlhf_mcore.residency.sharing import DeviceSharing
    from rlhf_mcore.trainer.record import RunRecord

# Largest mean logprob difference of a response. A different summation order changes logprobs by 1e-6 in fp32 and 1e-2 in bf16.
# In an MoE model, a token near the border between two experts may also be routed to the other expert.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
OF_8_BITS = 0.5  # tolerance for engines with quantised weights
NUM_TOKENS, MAX_NEW_TOKENS = 8, 4  # tokens per prompt; most tokens per response


@dataclass(slots=True)
class EnginePublisher:
    """Sends the actor's weights to the colocated engines. The engines sleep while other components need the device."""

    sleeper: Sleeper
    bridge: WeightBridge
    recorder: RunRecord
    sharing: DeviceSharing
    canary: Canary | None = None
    _version: int = field(default=-1, init=False)  # version of the last published weights
    _responses: list[Trajectory] | None = field(default=None, init=False)  # canary responses that are not scored yet

    def publish(self, version: int) -> Mapping[str, float]:
        """Replace the weights of the engines. Their KV caches are allocated after the sync frees its buffers. Collective."""
        with self.recorder.phase("sync"):
            stats = self._sync(version)
        return {"bridge/received_bytes": float(stats.received_bytes), "bridge/local_bytes": float(stats.local_bytes)}

    def withdraw(self) -> None:
        """Put the engines to sleep until the next sync, and score the canary's responses. Collective."""
        self.sharing.sleep(self.sleeper)
        if self.canary is not None and self._responses is not None:
            with self.recorder.phase("sync"):
                responses, self._responses = self._responses, None
                self.canary.score(self._version, responses)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Put the engines to sleep within the block, and reload the same weights after it. Collective.

        A save loads offloaded models back to the device. With sleeping engines it needs no more memory than an update. If no model
        is offloaded, the engines stay awake.
        """
        if not self.sharing.parts:
            yield
            return
        self.withdraw()
        try:
            yield
        except SaveError:  # raised on every rank; the run may continue
            self._sync(self._version)
            raise
        self._sync(self._version)

    def _sync(self, version: int) -> SyncStats:
        # The update's tensors are being copied to the host. If they fit next to the engine, they leave the device after the sync.
        self.sharing.make_room(self.sharing.engine_bytes)
        self.sharing.wake(self.sleeper, "weights")
        stats = self.bridge.sync(version)
        self._version = version
        self.sharing.settle()
        self.sharing.wake(self.sleeper, "kv_cache")
        if self.canary is not None:
            self._responses = self.canary.sample(version)
            if not self.sharing.parts:  # otherwise the trainer's weights only fit when the engines sleep
                responses, self._responses = self._responses, None
                self.canary.score(version, responses)
        return stats


@dataclass(slots=True)
class RemotePublisher:
    """Sends the actor's weights to disaggregated engines. The engines continue sampling after the sync."""

    bridge: WeightBridge
    recorder: RunRecord
    drain: Callable[[int], None] | None = None  # called before the sync of a step
    canary: Canary | None = None

    def publish(self, version: int) -> Mapping[str, float]:
        """Replace the weights of all engines between two of their steps. Collective."""
        if self.drain is not None:
            with self.recorder.phase("drain"):
                self.drain(version)
        with self.recorder.phase("sync"):
            stats = self.bridge.sync(version)
            if self.canary is not None:
                self.canary.check(version)
        share = {"bridge/sent_share": stats.sent_bytes / stats.whole_bytes} if stats.whole_bytes else {}
        return {"bridge/sent_bytes": float(stats.sent_bytes), **share}

    def withdraw(self) -> None:
        """Do nothing, because the engines continue sampling."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Compares the engines' logprobs with the trainer's logprobs on the tokens of a few short responses.

    ``sampling`` must use the temperature at which ``actor`` computes logprobs, and must sample from the whole vocabulary.
    """

    sampler: ResponseSampler
    target: WeightTarget
    actor: LogprobModel
    prompts: Sequence[Prompt]
    sampling: Sampling
    tolerance: float

    def check(self, version: int) -> None:
        """Generate responses on all engines, and compare their logprobs with the trainer. Collective over the world.

        Raises:
            SyncMismatch: same condition as in ``score``.
        """
        self.score(version, self.sample(version))

    def sample(self, version: int) -> list[Trajectory]:
        """Generate a response to each canary prompt, on one engine each. Returns this rank's responses. Collective over the world."""
        engine = self.sampler.rank
        mine = [self.prompts[place] for place in range(engine.engine_index, len(self.prompts), engine.num_engines)]
        return self.sampler.sample(mine, self.sampling, step=version)

    def score(self, version: int, responses: Sequence[Trajectory]) -> None:
        """Compare the sampled responses' logprobs with the trainer's. Collective over the world.

        The trainer must still hold the weights of ``version``.

        Raises:
            SyncMismatch: the logprobs differ by more than the tolerance. The engines are unusable until the next full sync.
        """
        difference = self._difference(responses)
        if not difference <= self.tolerance:
            problem = (
                f"after the sync of version {version} an engine's logprobs of the canary differ from the trainer's by "
                f"{difference:.3g} on average, more than {self.tolerance:g}"
            )
            self.target.abandon(problem)
            raise SyncMismatch(problem)

    def _difference(self, trajectories: Sequence[Trajectory]) -> float:
        """Return the largest mean logprob difference of a response, over all engines. Equal on every rank."""
        engine = self.sampler.rank
        mine = range(engine.engine_index, len(self.prompts), engine.num_engines) if engine.is_lead else ()
        rollouts = [Rollout(place, t, Score(0.0)) for place, t in zip(mine, trajectories, strict=True)]
        batch, _ = RowExchange(1)(SampledBatch(list(self.prompts), rollouts))
        gaps = (self.actor.compute_logprobs(batch) - batch.rollout_logprobs).abs()
        rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
        means = (rows.sums(gaps, batch.loss_mask) / batch.num_sampled).tolist()
        return max((mean if math.isfinite(mean) else math.inf for mean in means), default=0.0)


def canary_prompts(count: int, num_tokens: int, vocab_size: int) -> list[Prompt]:
    """Build ``count`` fixed prompts of fixed tokens. ``count`` must be a multiple of the number of engines."""
    ids = [[(31 * number + 7 * t + 3) % vocab_size for t in range(num_tokens)] for number in range(count)]
    return [Prompt(f"canary-{number}", number, tokens, "canary") for number, tokens in enumerate(ids)]
