"""How a step's work is cut: sequences, tokens and microbatches of a data-parallel rank, and the bubble of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mcore.config.derive import is_supervised, longest_example, rows_per_example
from rlhf_mcore.config.schema import Config
from rlhf_mcore.planning.hardware import Assumptions
from rlhf_mcore.planning.roles import Role


@dataclass(frozen=True, slots=True)
class Workload:
    """One step. Tokens are expected ones, at the assumed mean length; ``microbatch_tokens`` is the limit."""

    sequences: int
    prompt_tokens: float
    response_tokens: float  # of a sequence
    microbatch_tokens: int

    @property
    def tokens(self) -> float:
        """Of a step, over all ranks."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)


def workload(cfg: Config, assumed: Assumptions) -> Workload:
    """What a step generates and learns from, or of a supervised run what it is given."""
    trainer, sampling = cfg.trainer, cfg.rollout.sampling
    if is_supervised(cfg):
        rows, longest = trainer.prompts_per_step * rows_per_example(cfg), longest_example(cfg)
        return Workload(rows, longest * assumed.mean_length, 0.0, trainer.max_tokens_per_microbatch)
    return Workload(
        trainer.prompts_per_step * sampling.n,
        cfg.data.max_prompt_tokens * assumed.mean_length,
        sampling.max_new_tokens * assumed.mean_length,
        trainer.max_tokens_per_microbatch,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """The share of one data-parallel rank in one update (for a frozen model in one pass)."""

    dp: int
    sequences: float
    num_microbatches: int
    bubble: float  # share of the pipeline's time in which a stage waits


def cut(work: Workload, role: Role) -> Cut:
    """Microbatches of an update and the bubble (p - 1) / (v m + p - 1) (Narayanan et al. 2021, arXiv 2104.04473, 2.2)."""
    layout, share = role.layout, role.epochs / role.updates / role.layout.dp
    count = max(1, -(-int(work.tokens * share) // work.microbatch_tokens))
    if layout.vpp:
        count = -(-count // layout.pp) * layout.pp
    waiting = layout.pp - 1
    return Cut(layout.dp, work.sequences * share, count, waiting / ((layout.vpp or 1) * count + waiting))
