"""A canary after every sync: each engine's logprobs of a few tokens must be the trainer's.

It is cheap (four tokens an engine) and sees what hashes of weights cannot: kernels that read other weights than were
written, memory that did not come back from sleep. It sees gross errors only; ``bridge.verify`` proves that every bit arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_mcore.algorithms.rows import OwnedRows
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.protocols import LogprobModel, SyncMismatch, WeightTarget
from rlhf_mcore.trainer.batch_sampler import BatchSampler
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.sampled import Rollout, SampledBatch
from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory

# Largest mean difference of a response's logprobs. Sums in another order differ by 1e-6 in fp32 and by 1e-2 in bf16, and in a mixture
# a token near the border between two experts may take the other one.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
OF_8_BITS = 0.5  # where an engine's weights are quantised
NUM_TOKENS, MAX_NEW_TOKENS = 8, 4  # of a prompt, and of a response, at most


@dataclass(frozen=True, slots=True)
class Canary:
    """Compare engines with the trainer: both must give the tokens of a few short responses the same logprobs.

    ``sampling`` has the temperature at which ``actor`` computes logprobs, and draws from the whole vocabulary.
    """

    sampler: BatchSampler
    target: WeightTarget
    actor: LogprobModel
    prompts: Sequence[Prompt]
    sampling: Sampling
    tolerance: float

    def check(self, version: int) -> None:
        """Generate responses on all engines and let the trainer score them. Collective over the world.

        Raises:
            SyncMismatch: as ``score``.
        """
        self.score(version, self.draw(version))

    def draw(self, version: int) -> list[Trajectory]:
        """Generate responses to the canary's prompts, each on one engine; returns those of this rank. Collective over the world."""
        engine = self.sampler.rank
        mine = [self.prompts[place] for place in range(engine.engine_index, len(self.prompts), engine.num_engines)]
        return self.sampler.sample(mine, self.sampling, step=version)

    def score(self, version: int, drawn: Sequence[Trajectory]) -> None:
        """Compare what was drawn with the trainer, which must have the weights of ``version`` still. Collective over the world.

        Raises:
            SyncMismatch: the logprobs differ by more than the tolerance. The engines are unusable until the next whole sync.
        """
        difference = self._difference(drawn)
        if not difference <= self.tolerance:
            problem = (
                f"after the sync of version {version} an engine's logprobs of the canary differ from the trainer's by "
                f"{difference:.3g} on average, more than {self.tolerance:g}"
            )
            self.target.abandon(problem)
            raise SyncMismatch(problem)

    def _difference(self, trajectories: Sequence[Trajectory]) -> float:
        """Return the largest mean difference of a response over all engines, the same on every rank."""
        engine = self.sampler.rank
        mine = range(engine.engine_index, len(self.prompts), engine.num_engines) if engine.is_lead else ()
        rollouts = [Rollout(place, t, Score(0.0)) for place, t in zip(mine, trajectories, strict=True)]
        batch, _ = RowExchange(1)(SampledBatch(list(self.prompts), rollouts))
        gaps = (self.actor.compute_logprobs(batch) - batch.rollout_logprobs).abs()
        rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
        means = (rows.sums(gaps, batch.loss_mask) / batch.num_sampled).tolist()
        return max((mean if math.isfinite(mean) else math.inf for mean in means), default=0.0)


def canary_prompts(count: int, num_tokens: int, vocab_size: int) -> list[Prompt]:
    """Build fixed prompts of fixed tokens. ``count``: a multiple of the number of engines."""
    ids = [[(31 * number + 7 * t + 3) % vocab_size for t in range(num_tokens)] for number in range(count)]
    return [Prompt(f"canary-{number}", number, tokens, "canary") for number, tokens in enumerate(ids)]
