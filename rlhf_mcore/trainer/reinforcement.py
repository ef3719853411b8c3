"""The learner of reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.trainer.divergence import share_results
from rlhf_mcore.trainer.metrics import agreement_metrics

if TYPE_CHECKING:
    from rlhf_mcore.protocols import (
        TrainableModel,
    )
    from rlhf_mcore.roles.policy import Actor, Reference
    from rlhf_mcore.roles.scalar_models import Critic
    from rlhf_mcore.trainer.advantages import AdvantageComputer
    from rlhf_mcore.trainer.record import RunRecord, TokenRecord
    from rlhf_mcore.trainer.work import StepWork
    from rlhf_mcore.types import Field, TrainBatch, UpdateResult


@dataclass(frozen=True, slots=True)
class Roles:
    """The models of a run. A model that the algorithm does not need is None.

    ``warmup_steps``: number of first steps in which only the critic learns. ``refresh_steps``: interval in steps between copies
    of the actor's weights to the reference (0: never).
    """

    actor: Actor
    critic: Critic | None = None
    reference: Reference | None = None
    warmup_steps: int = 0
    refresh_steps: int = 0
    # Field name -> function of an additional model that computes this field for the batch's tokens, [N, ...]. Collective.
    computes: Mapping[str, Callable[[TrainBatch], Field]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PolicyLearner:
    """Updates the actor with policy gradients, and the critic if there is one."""

    roles: Roles
    compute_advantages: AdvantageComputer
    recorder: RunRecord
    entropy_every: int = 1
    work: StepWork | None = None
    tokens: TokenRecord | None = None

    def learn(self, step: int, batch: TrainBatch) -> tuple[list[UpdateResult], Mapping[str, float]]:
        """Compute logprobs and values before any update, then advantages, then run the updates. Collective.

        If the step is a single update, its own forward pass provides the old logprobs, without a separate pass.
        """
        batch.policy_version = step - 1  # the previous step published this version
        batch.with_entropy = self.entropy_every > 0 and (step - 1) % self.entropy_every == 0
        self._compute(step, batch)
        in_update = batch.old_logprobs is None
        metrics = {} if in_update else agreement_metrics(batch)
        metrics |= self.compute_advantages(batch)
        with self.recorder.phase("update"):
            results = self._update(step, batch)
            if in_update:
                batch.old_logprobs = self.roles.actor.logprobs_of_update(batch)
                metrics |= agreement_metrics(batch) | self.compute_advantages.compare(batch)
        if self.tokens is not None:
            self.tokens.write(step, batch)
        if self.work is not None:
            self.work.count(batch, learns=step > self.roles.warmup_steps, has_old_pass=not in_update)
        return results, metrics | {"actor/old_logprobs_of_update": float(in_update)}

    def _compute(self, step: int, batch: TrainBatch) -> None:
        roles, timed = self.roles, self.recorder.phase
        if roles.reference is not None:
            with timed("reference"):
                if roles.refresh_steps and step > 1 and (step - 1) % roles.refresh_steps == 0:
                    roles.reference.refresh(roles.actor)
                batch.ref_logprobs = roles.reference.compute_logprobs(batch)
        for name, compute in roles.computes.items():
            with timed(name):
                batch.fields[name] = compute(batch)
        if roles.critic is not None:
            with timed("values"):
                batch.old_values, batch.bootstrap_values = roles.critic.compute_values(batch)
        learns, estimation = step > roles.warmup_steps, self.compute_advantages
        with timed("old_logprobs"):
            if not learns or estimation.needs_old_logprobs(batch) or not roles.actor.makes_one_update(batch):
                batch.old_logprobs = roles.actor.compute_logprobs(batch)

    def _update(self, step: int, batch: TrainBatch) -> list[UpdateResult]:
        """Update critic and actor. Both receive their rows first, so models on different ranks are updated concurrently."""
        if self.compute_advantages.cfg.mask_truncated:
            batch = without_truncated(batch)
        learning: list[TrainableModel] = [self.roles.actor] if step > self.roles.warmup_steps else []
        if self.roles.critic is not None:
            learning.insert(0, self.roles.critic)
        updates = [role.deliver_update(batch) for role in learning]
        return share_results([update() for update in updates])


def without_truncated(batch: TrainBatch) -> TrainBatch:
    """Remove the tokens of truncated rows from the loss. The row count that divides the loss still includes these rows.

    This is the overlong filtering of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4).
    """
    kept = ~batch.truncated
    own = OwnedRows(batch.rows, batch.lengths).to_tokens(kept)
    return replace(batch, loss_mask=batch.loss_mask & own, num_sampled=batch.num_sampled * kept)


class NoEvaluator:
    """An evaluator for runs without held-out prompts."""

    def is_due(self, step: int, num_steps: int) -> bool:
        return False

    def run(self, step: int) -> dict[str, float]:
        return {}
