"""The source, learner and publisher of synchronous reinforcement learning: the current policy samples every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.checkpoint.disk import SaveError
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.sampling.rollouts import sampling_of_batch
from rlhf_mcore.trainer.divergence import share_results
from rlhf_mcore.trainer.metrics import agreement_metrics, draft_metrics, rollout_metrics, source_metrics
from rlhf_mcore.trainer.sampled import Rollout, SampledBatch
from rlhf_mcore.types import DRAFTS

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rlhf_mcore.data.source import PromptBatches
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
    from rlhf_mcore.trainer.batch_sampler import BatchSampler
    from rlhf_mcore.trainer.canary import Canary
    from rlhf_mcore.trainer.exchange import RowExchange
    from rlhf_mcore.trainer.record import RunRecord, TokenRecord
    from rlhf_mcore.trainer.sampled import BeginScores, FillStep
    from rlhf_mcore.trainer.work import StepWork
    from rlhf_mcore.types import Field, Prompt, Sampling, Score, TrainBatch, Trajectory, UpdateResult

# (trajectories sampled by this rank, their scores by graders) -> the scores with a reward model's score added.
AddScores = Callable[["Sequence[Trajectory]", "list[Score]"], "list[Score]"]


def keep_scores(trajectories: Sequence[Trajectory], scores: list[Score]) -> list[Score]:
    """Return the scores unchanged."""
    return scores


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
class ColocatedBatches:
    """Synchronous batches: each step samples its own responses. Finished responses are scored while others are sampled.

    ``add_model`` adds the scores of a reward model, which needs the device, to the scores of graders. Collective.
    ``pop_preemptions`` returns the preemptions of this rank's engine since the last call; None if the engine does not count them.
    """

    prompt_source: PromptBatches
    sampler: BatchSampler
    sampling: Sampling
    begin_scores: BeginScores
    fill_step: FillStep
    exchange: RowExchange
    recorder: RunRecord
    add_model: AddScores = keep_scores
    pop_preemptions: Callable[[], int] | None = None

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """Return the scored rows of a step and their metrics. Collective over the world."""
        sampled = self.fill_step(lambda _missing, number: self._sample(step, number))
        batch, metrics = scored_batch(step, sampled, self.exchange, self.recorder, self.sampler.dealer.note)
        if self.pop_preemptions is not None:
            metrics["rollout/preemptions"] = float(sum(all_gather_json(self.pop_preemptions())))
        return batch, metrics

    def _sample(self, step: int, number: int) -> SampledBatch:
        """Sample and score batch ``number`` of a step."""
        prompts = self.prompt_source.next_batch()
        begun: dict[int, Future[list[Score]]] = {}  # prompt index -> scores of its trajectories
        longest = count = 0

        def on_finish(place: int, trajectories: Sequence[Trajectory], waiting: int) -> None:
            nonlocal longest, count
            begun[place] = self.begin_scores(trajectories)
            count += len(trajectories)
            longest = max(longest, *(trajectory.num_sampled for trajectory in trajectories))
            self.recorder.progress(f"{count} finished · {waiting} waiting · longest {longest:,} tokens")

        with self.recorder.phase("generate"):
            self.recorder.progress(f"{len(prompts) * self.sampling.num_drawn} responses to {len(prompts)} prompts")
            sampling = sampling_of_batch(self.sampling, number)
            placed = self.sampler.sample_step(prompts, sampling, step=step, finished=on_finish)
        with self.recorder.phase("score"):
            scores = [score for place in sorted(begun) for score in begun[place].result()]
            scores = self.add_model([trajectory for _, trajectory in placed], scores)
        rollouts = [Rollout(*each, score) for each, score in zip(placed, scores, strict=True)]
        return SampledBatch(prompts, rollouts)


def scored_batch(
    step: int,
    sampled: SampledBatch,
    exchange: RowExchange,
    recorder: RunRecord,
    note_lengths: Callable[[Sequence[Prompt], Sequence[int], Sequence[int]], None] = lambda *_: None,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the rows of a step, built from the rollouts of every rank, and their metrics. Collective over the world."""
    if exchange.baselines:
        sampled = sampled.separate_greedy(exchange.samples_per_prompt)
    recorder.rollouts(step, sampled.rollouts)
    with recorder.phase("exchange"):
        batch, facts = exchange(sampled)
    assert batch.prompts is not None
    note_lengths(batch.prompts, batch.group_ids.tolist(), batch.num_sampled.tolist())
    metrics = sampled.metrics() | rollout_metrics(batch, facts) | source_metrics(batch, facts)
    if DRAFTS in batch.fields:
        metrics |= draft_metrics(batch.fields.pop(DRAFTS))
    return batch, metrics


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
