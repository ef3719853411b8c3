"""The policies of a run: an actor, trained by reinforcement or by imitation, and the frozen reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlhf_mcore.algorithms.correction import RATIO_MODES, factors_of_microbatch
from rlhf_mcore.algorithms.covariance import CHOSEN, choose_tokens
from rlhf_mcore.algorithms.interfaces import LossInputs, PolicyLoss, fields_read, pick_fields
from rlhf_mcore.algorithms.kl import kl_penalty
from rlhf_mcore.algorithms.masking import OwnedRows, masked_sum, weighted_sum
from rlhf_mcore.algorithms.registry import find_policy_loss
from rlhf_mcore.algorithms.supervised import perplexity, sft_loss
from rlhf_mcore.config.choices import READS_COVARIANCE
from rlhf_mcore.config.schema import AlgorithmConfig
from rlhf_mcore.data.collate import sequence_ids
from rlhf_mcore.mcore.model import MegatronModel, Metrics
from rlhf_mcore.mcore.route_replay import Routing
from rlhf_mcore.parallel.logprobs import TokenLogprobs
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.roles.model import RoleModel, RowOutputs, zero_outside_mask
from rlhf_mcore.roles.trained_model import Objective, TrainedModel, Update, minibatches
from rlhf_mcore.types import ROUTES, TEACHER_TOP, Field, Microbatch, Ragged, TrainBatch

if TYPE_CHECKING:
    from rlhf_mcore.algorithms.kl import Divergence


def logprobs_of(
    model: RoleModel,
    batch: TrainBatch,
    temperature: float,
    support: Ragged[Tensor] | None = None,
    routes: Mapping[str, Field] | None = None,
) -> Tensor:
    """Compute logprobs [N] fp32 of the tokens in the loss mask at a sampling temperature, zero elsewhere.

    With a ``support`` for the batch's tokens, the result is [N, 2], as in ``sampling_logprobs``. ``routes``: routes for
    the model to replay. Collective over the world.
    """

    def logprobs(outputs: Tensor, microbatch: Microbatch) -> Tensor:
        assert model.model is not None
        return sampling_logprobs(model.model.logprobs_and_entropy(outputs, microbatch, temperature, with_entropy=False))

    fields: dict[str, Field] = {"loss_mask": batch.loss_mask, **(routes or {})}
    if support is None:
        return model.per_token(batch, logprobs, fields)
    return model.per_token(batch, logprobs, {**fields, "support": support}, shape=(2,))


def routes_of(batch: TrainBatch, replay: str) -> dict[str, Field]:
    """Return the routes of a batch by field name, or {} if there are none or they are not replayed."""
    return {ROUTES: batch.fields[ROUTES]} if replay != "off" and ROUTES in batch.fields else {}


def sampling_logprobs(whole: TokenLogprobs) -> Tensor:
    """Return logprobs under the sampling distribution: [...], or with a support [..., 2] including the log of its mass.

    ``whole``: logprobs under the whole distribution.
    """
    if whole.log_mass is None:
        return whole.logprobs
    return torch.stack([whole.logprobs - whole.log_mass, whole.log_mass], dim=-1)


def set_log_mass(batch: TrainBatch, found: Tensor) -> Tensor:
    """Return the logprobs [N] in ``sampling_logprobs`` of all tokens. If there is a support, set ``batch.log_mass``."""
    if batch.support is None:
        return found
    logprobs, batch.log_mass = found.contiguous().unbind(-1)
    return logprobs


@dataclass(slots=True)
class Reference:
    """The frozen reference policy of the KL. It has the actor's layout, so each rank can refresh its own part.

    If the actor learns adapters, ``model`` is the actor's own model, and runs without them.
    """

    model: RoleModel
    temperature: float

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Compute logprobs [N] fp32 of the sampled tokens, zero elsewhere. Collective over the world."""
        with self.model.adapters_off():
            return logprobs_of(self.model, batch, self.temperature)

    def refresh(self, actor: Actor) -> None:
        """Copy the actor's weights."""
        self.model.blend(actor.model, 1.0)


@dataclass(frozen=True, slots=True)
class PolicyObjective(Objective):
    """A policy-gradient loss with rollout correction, minus the entropy bonus, plus optional KL and divergence terms."""

    weighted: ClassVar[tuple[str, ...]] = ("policy",)

    algorithm: AlgorithmConfig
    policy_loss: PolicyLoss
    temperature: float
    kl_coef: float = 0.0
    with_entropy: bool = True  # whether to report it; an entropy bonus always computes it
    divergence: Divergence | None = None  # from a teacher's distributions
    router_replay: str = "off"
    # Receives the logprobs of each microbatch, if the update's forward pass also computes the old logprobs
    kept: list[tuple[Tensor, Microbatch]] = field(default_factory=list)

    def fields(self, batch: TrainBatch) -> dict[str, Field]:
        assert batch.advantages is not None
        optional: dict[str, Field | None] = {
            "support": batch.support,
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs if self.kl_coef else None,
            "correction": batch.correction,
        }
        if batch.old_logprobs is None and self.algorithm.rollout_correction.mode in RATIO_MODES:
            optional["rollout_logprobs"] = batch.rollout_logprobs
        if self.divergence is not None:
            optional[TEACHER_TOP] = batch.fields[TEACHER_TOP]
        declared = pick_fields(batch, self.policy_loss, f"algorithm.policy_loss={self.algorithm.policy_loss}")
        return {"advantages": batch.advantages, **declared, **routes_of(batch, self.router_replay)} | {
            name: value for name, value in optional.items() if value is not None
        }

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        """Sum the terms of the loss. Entropy and KL use the whole distribution."""
        with_entropy, cfg = self.with_entropy or bool(self.algorithm.entropy_coef), self.algorithm
        whole = model.logprobs_and_entropy(
            outputs, microbatch, self.temperature, with_entropy=with_entropy, divergence=self.divergence
        )
        fields = microbatch.fields_on(whole.logprobs.device)
        weights = fields["weights"]
        trainable = weights > 0
        policy, metrics = self.policy_loss(self._loss_inputs(whole, microbatch, fields))
        loss = policy
        metrics["policy"] = policy.detach().clone()
        if whole.entropy is not None:
            metrics["entropy"] = masked_sum(whole.entropy.detach(), trainable)
        if cfg.entropy_coef:
            assert whole.entropy is not None
            loss = loss - cfg.entropy_coef * weighted_sum(whole.entropy, weights)
        if self.kl_coef:
            kl = kl_penalty(whole.logprobs, fields["ref_logprobs"], cfg.kl.estimator, mask=trainable, clip=cfg.kl.clip)
            loss = loss + self.kl_coef * weighted_sum(kl, weights)
            metrics["kl"] = masked_sum(kl.detach(), trainable)
        if self.divergence is not None:
            assert whole.divergence is not None
            loss = loss + self.divergence.coef * weighted_sum(whole.divergence, weights)
            metrics["divergence"] = masked_sum(whole.divergence.detach(), trainable)
        return loss, metrics

    def _loss_inputs(self, whole: TokenLogprobs, microbatch: Microbatch, fields: dict[str, Tensor]) -> LossInputs:
        """Return the inputs of the policy loss, whose ratios use the sampling distribution, renormalised on a support.

        Without ``old_logprobs``, the old policy is the current policy: every ratio is 1.
        """
        logprobs = whole.logprobs if whole.log_mass is None else whole.logprobs - whole.log_mass
        weights = fields["weights"]
        ids, count = sequence_ids(microbatch)
        ids = microbatch.placed.get("sequence_ids", ids).to(logprobs.device)
        old = fields.get("old_logprobs")
        if old is None:
            old = logprobs.detach()
            self.kept.append((sampling_logprobs(whole).detach(), microbatch))
        corrected = weights * fields["correction"] if "correction" in fields else weights
        if "rollout_logprobs" in fields:
            corrected = corrected * factors_of_microbatch(
                old, fields["rollout_logprobs"], weights > 0, ids, count, self.algorithm.rollout_correction
            )
        return LossInputs(
            logprobs,
            old,
            fields["advantages"],
            mask=weights > 0,
            weights=corrected,
            sequence_ids=ids,
            num_sequences=count,
            fields={name: (microbatch.ragged | fields)[name] for name in fields_read(self.policy_loss)},
        )

    def metrics(self, loss: float, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        named = {"loss/total": loss, "loss/policy": sums.pop("policy")}
        if "kl" in sums:
            named["loss/kl"] = sums.pop("kl") / num_tokens
        if "divergence" in sums:
            named["teacher/divergence"] = sums.pop("divergence") / num_tokens
        return named | {f"actor/{name}": value / num_tokens for name, value in sums.items()}


@dataclass(slots=True)
class Actor:
    """The policy being trained."""

    model: TrainedModel
    temperature: float
    algorithm: AlgorithmConfig
    divergence: Divergence | None = None  # from a teacher's distributions, if it is in the loss
    router_replay: str = "off"
    _policy_loss: PolicyLoss = field(init=False)
    _passes: list[tuple[Tensor, Microbatch]] = field(init=False, default_factory=list)  # ``PolicyObjective.kept``

    def __post_init__(self) -> None:
        self._policy_loss = find_policy_loss(self.algorithm)

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Compute logprobs [N] fp32 of the sampled tokens under the distribution they were sampled from, zero elsewhere.

        With a support, also set ``batch.log_mass``. Collective over the world.
        """
        routes = routes_of(batch, self.router_replay)
        with self._recording_routes(batch):
            found = logprobs_of(self.model, batch, self.temperature, batch.support, routes)
        return set_log_mass(batch, found)

    def _recording_routes(self, batch: TrainBatch) -> AbstractContextManager[None]:
        """Record the routes of a pass within this block, if updates replay them."""
        if self.router_replay != "old_logprobs":
            return nullcontext()
        return recorded_routes(self.model, batch)

    def deliver_update(self, batch: TrainBatch) -> Update:
        """Prepare all updates of a step, with the step's KL coefficient.

        See :meth:`TrainedModel.deliver_update`.
        """
        if self.algorithm.policy_loss in READS_COVARIANCE:
            members = minibatches(batch.group_ids, self.model.plan.prompts_per_minibatch)
            rows, cfg = OwnedRows(batch.rows, batch.lengths, merge_rows), self.algorithm.covariance
            band = None if self.algorithm.policy_loss == "kl_cov" else (cfg.low, cfg.high)
            batch.fields[CHOSEN] = choose_tokens(batch, members, rows, cfg.share, band)
        self._passes = []
        objective = PolicyObjective(
            self.algorithm,
            self._policy_loss,
            self.temperature,
            batch.kl_coef,
            batch.with_entropy,
            self.divergence,
            self.router_replay,
            self._passes,
        )
        return self.model.deliver_update(batch, objective)

    def makes_one_update(self, batch: TrainBatch) -> bool:
        """Return whether a step learns from these rows in one update."""
        return self.model.makes_one_update(batch)

    def logprobs_of_update(self, batch: TrainBatch) -> Tensor:
        """Return logprobs [N] fp32 of the update's forward pass, in the form of ``compute_logprobs``.

        Collective over the world.
        """
        values, microbatches = [values for values, _ in self._passes], [microbatch for _, microbatch in self._passes]
        found = RowOutputs(self.model.deal(batch), values, microbatches)
        logprobs = self.model.to_owners(batch, found, shape=() if batch.support is None else (2,))
        self._passes = []
        return set_log_mass(batch, zero_outside_mask(batch, logprobs))


def replay_routes(model: RoleModel) -> None:
    """Make a model replay the routes of batches that contain routes."""
    if model.model is not None:
        model.model.routing = Routing.of(model.model)


@contextmanager
def recorded_routes(model: RoleModel, batch: TrainBatch) -> Iterator[None]:
    """Set the batch's field ``ROUTES`` to the routes of the pass within this block. Collective over the world."""
    routing = None if model.model is None else model.model.routing
    if routing is not None:
        routing.noted = {}
    yield
    experts = model.spec.geometry.experts
    assert experts is not None, "config.validate refuses dense models"
    found = RowOutputs(model.deal(batch), *(routing.pop_recorded() if routing is not None else ()))
    shape = len(model.spec.geometry.moe_layers), experts.per_token
    batch.fields[ROUTES] = model.to_owners(batch, found, shape, torch.int16)


@dataclass(frozen=True, slots=True)
class ImitationObjective(Objective):
    """Negative log-likelihood of the responses."""

    def loss(self, model: MegatronModel, outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, Metrics]:
        logprobs = model.logprobs_and_entropy(outputs, microbatch, temperature=1.0, with_entropy=False).logprobs
        return sft_loss(logprobs, microbatch.fields_on(logprobs.device)["weights"])

    def metrics(self, loss: float, sums: dict[str, float], num_tokens: float) -> dict[str, float]:
        return {"loss/sft": loss, "actor/perplexity": perplexity(sums["nll"] / num_tokens)}


@dataclass(slots=True)
class SupervisedActor:
    """A policy that learns to generate the responses in the data."""

    model: TrainedModel

    def compute_logprobs(self, batch: TrainBatch) -> Tensor:
        """Compute logprobs [N] fp32 of the response tokens, zero elsewhere. Collective over the world."""
        return logprobs_of(self.model, batch, temperature=1.0)

    def deliver_update(self, batch: TrainBatch) -> Update:
        """Prepare one update. See :meth:`TrainedModel.deliver_update`."""
        return self.model.deliver_update(batch, ImitationObjective())
