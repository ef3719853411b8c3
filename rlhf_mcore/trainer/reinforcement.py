"""The learner of reinforcement learning, and the publisher for colocated engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.checkpoint.disk import SaveError
from rlhf_mcore.trainer.divergence import share_results
from rlhf_mcore.trainer.metrics import agreement_metrics

if TYPE_CHECKING:
    from rlhf_mcore.protocols import (
        Sleeper,
        SyncStats,
        TrainableModel,
        WeightBridge,
    )
    from rlhf_mcore.residency.sharing import DeviceSharing
    from rlhf_mcore.roles.critic import Critic
    from rlhf_mcore.roles.policy import Actor, Reference
    from rlhf_mcore.trainer.advantages import AdvantageComputer
    from rlhf_mcore.trainer.canary import Canary
    from rlhf_mcore.trainer.record import RunRecord, TokenRecord
    from rlhf_mcore.trainer.work import StepWork
    from rlhf_mcore.types import Field, TrainBatch, Trajectory, UpdateResult


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


@dataclass(slots=True)
class EnginePublisher:
    """Sends the actor's weights to the colocated engines. The engines sleep while other components need the device."""

    sleeper: Sleeper
    bridge: WeightBridge
    recorder: RunRecord
    sharing: DeviceSharing
    canary: Canary | None = None
    _version: int = field(default=-1, init=False)  # version of the last published weights
    _drawn: list[Trajectory] | None = field(default=None, init=False)  # canary responses that are not scored yet

    def publish(self, version: int) -> Mapping[str, float]:
        """Replace the weights of the engines. Their KV caches are allocated after the sync frees its buffers. Collective."""
        with self.recorder.phase("sync"):
            stats = self._bring(version)
        return {"bridge/received_bytes": float(stats.received_bytes), "bridge/local_bytes": float(stats.local_bytes)}

    def withdraw(self) -> None:
        """Put the engines to sleep until the next sync, and score the canary's responses. Collective."""
        self.sharing.sleep(self.sleeper)
        if self.canary is not None and self._drawn is not None:
            with self.recorder.phase("sync"):
                drawn, self._drawn = self._drawn, None
                self.canary.score(self._version, drawn)

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
            self._bring(self._version)
            raise
        self._bring(self._version)

    def _bring(self, version: int) -> SyncStats:
        # The update's tensors are being copied to the host. If they fit next to the engine, they leave the device after the sync.
        self.sharing.make_room(self.sharing.engine_bytes)
        self.sharing.wake(self.sleeper, "weights")
        stats = self.bridge.sync(version)
        self._version = version
        self.sharing.settle()
        self.sharing.wake(self.sleeper, "kv_cache")
        if self.canary is not None:
            self._drawn = self.canary.draw(version)
            if not self.sharing.parts:  # otherwise the trainer's weights only fit when the engines sleep
                drawn, self._drawn = self._drawn, None
                self.canary.score(version, drawn)
        return stats


class NoEvaluator:
    """An evaluator for runs without held-out prompts."""

    def is_due(self, step: int, num_steps: int) -> bool:
        return False

    def run(self, step: int) -> dict[str, float]:
        return {}
