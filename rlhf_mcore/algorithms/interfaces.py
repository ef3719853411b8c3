"""The inputs and results of advantage estimators and policy losses, and the tables of registered ones.

A loss here takes its settings as keyword arguments, which it declares with :func:`takes`. A function of a user's own file takes the
group ``algorithm`` as its second argument, unless it declares settings too: see docs/algorithms/custom.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.config import choices
from rlhf_mcore.config.choices import registering
from rlhf_mcore.config.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.rows import OwnedRows
    from rlhf_mcore.config.schema import AlgorithmConfig
    from rlhf_mcore.config.schema.group import Group
    from rlhf_mcore.types import Field, TrainBatch

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class AdvantageInputs:
    """The responses of a step, in any order: tokens [N] of the rows that this rank owns, back to back, and numbers [B] of all rows.

    Values outside ``loss_mask`` may be anything. ``rows`` has the sums by row that estimators need.
    """

    rewards: Tensor  # [N] float64: after shaping, and after the KL if it is part of the reward
    loss_mask: Tensor  # [N] bool: trainable tokens
    rows: OwnedRows
    group_ids: Tensor  # [B] int64: equal for the responses to one prompt
    truncated: Tensor  # [B] bool: ended by the token limit, so not by the policy
    old_values: Tensor | None = None  # [N] float32: value of the state before a token; with a critic
    # [B] float32: value of the state after the last token; with bootstrap_truncated
    bootstrap_values: Tensor | None = None
    baselines: Tensor | None = None  # [B] float64: the score of the greedy response to the same prompt
    score_parts: Tensor | None = None  # [B, K] float64: the parts of the scores that algorithm.reward_weights names
    fields: Mapping[str, Field] = field(default_factory=dict)  # [N, ...] by name, those that the estimator ``reads``


@dataclass(slots=True)
class Advantages:
    """The result of an estimator, zero outside of the loss mask."""

    advantages: Tensor  # [N] float32
    returns: Tensor | None = None  # [N] float32: the targets of the critic


@dataclass(slots=True)
class LossInputs:
    """The tokens of a microbatch: tensors of one shape, packed [1, N] or padded [b, T].

    Outside of ``mask`` the weights are 0 and the other tensors may hold anything. Inside, ``weights`` carry the division by the counts
    of the whole minibatch and the rollout correction, which may be 0. The sequences of a microbatch are whole.
    """

    logprobs: Tensor  # current, differentiable
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor  # bool: trainable tokens
    weights: Tensor
    sequence_ids: Tensor  # int64: which sequence of the microbatch a token belongs to, 0 <= id < num_sequences
    num_sequences: int
    # By name, those that the loss ``reads``: [..., k] or ragged.
    fields: Mapping[str, Field] = field(default_factory=dict)


AdvantageEstimator = Callable[[AdvantageInputs, "AlgorithmConfig"], Advantages]
# Returns the tokens' share of the loss, differentiable, and detached scalar sums over the trainable tokens for the metrics.
PolicyLoss = Callable[[LossInputs], "tuple[Tensor, dict[str, Tensor]]"]

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}
# Policy losses that also take the settings that they declare with ``takes``.
POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {}

# Decorators that register a function under its name in ``algorithm.advantage`` or ``algorithm.policy_loss``.
advantage_estimator = registering(ADVANTAGE_ESTIMATORS, choices.ADVANTAGES)
policy_loss = registering(POLICY_LOSSES, choices.POLICY_LOSSES)


def reads(*names: str) -> Callable[[F], F]:
    """Declare the fields of tokens that a loss or an estimator reads beside those that all get: ``@reads("teacher_logprobs")``.

    They arrive in ``fields`` of its inputs: recorded by engines, computed by roles, or an optional field of
    :class:`~rlhf_mcore.types.TrainBatch`.
    """

    def declare(function: F) -> F:
        function.reads = names  # type: ignore[attr-defined]
        return function

    return declare


def takes(*keys: str) -> Callable[[F], F]:
    """Declare the settings that a loss takes as keyword arguments: ``@takes("clip_low", "sapo.tau_positive")``.

    A key is relative to the loss's group of the configuration. Its last part is the name of the argument.
    """

    def declare(function: F) -> F:
        function.takes = keys  # type: ignore[attr-defined]
        return function

    return declare


def bind(function: Callable[..., R], group: Group) -> Callable[[T], R]:
    """Return a loss that needs only its inputs: the settings that it takes are read from ``group`` here, once.

    A function that declares none, such as one of a user's file, gets the whole group as its second argument.
    """
    keys: tuple[str, ...] | None = getattr(function, "takes", None)
    if keys is None:

        def bound(inputs: T) -> R:
            return function(inputs, group)

    else:
        settings = {key.rpartition(".")[2]: attrgetter(key)(group) for key in keys}

        def bound(inputs: T) -> R:
            return function(inputs, **settings)

    update_wrapper(bound, function)
    return reads(*fields_read(function))(bound)


def fields_read(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names that ``reads`` has declared for a function."""
    return getattr(function, "reads", ())


def pick_fields(batch: TrainBatch, function: Callable[..., Any], chosen_by: str) -> dict[str, Field]:
    """Return the fields of a batch that a function reads.

    Raises:
        ConfigError: the batch lacks one; ``chosen_by`` is the setting that has chosen the function.
    """
    try:
        return {name: batch.field_of_tokens(name) for name in fields_read(function)}
    except KeyError as error:
        there = ", ".join(batch.fields) or "none"
        raise ConfigError(
            f"{chosen_by} reads {error.args[0]!r} of every token, which no role computes and no engine records here "
            f"(there is: {there}); choose another function, or configure the role that computes it"
        ) from None
