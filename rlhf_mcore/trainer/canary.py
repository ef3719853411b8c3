"""A canary check after every sync: each engine's logprobs of a few tokens must match the trainer's logprobs.

The check is cheap (four tokens per engine). It detects errors that weight hashes cannot detect: kernels that read the wrong
weights, or memory that sleep mode did not restore. It detects large errors only; ``bridge.verify`` compares every bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.protocols import LogprobModel, ResponseSampler, SyncMismatch, WeightTarget
from rlhf_mcore.trainer.batches import Rollout, SampledBatch
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory

# Largest mean logprob difference of a response. A different summation order changes logprobs by 1e-6 in fp32 and 1e-2 in bf16.
# In an MoE model, a token near the border between two experts may also be routed to the other expert.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
OF_8_BITS = 0.5  # tolerance for engines with quantised weights
NUM_TOKENS, MAX_NEW_TOKENS = 8, 4  # tokens per prompt; most tokens per response


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
        self.score(version, self.draw(version))

    def draw(self, version: int) -> list[Trajectory]:
        """Generate a response to each canary prompt, on one engine each. Returns this rank's responses. Collective over the world."""
        engine = self.sampler.rank
        mine = [self.prompts[place] for place in range(engine.engine_index, len(self.prompts), engine.num_engines)]
        return self.sampler.sample(mine, self.sampling, step=version)

    def score(self, version: int, drawn: Sequence[Trajectory]) -> None:
        """Compare the sampled responses' logprobs with the trainer's. Collective over the world.

        The trainer must still hold the weights of ``version``.

        Raises:
            SyncMismatch: the logprobs differ by more than the tolerance. The engines are unusable until the next full sync.
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
