"""The inputs and results of advantage estimators and policy losses, and the tables of the registered functions.

A loss in this package takes its settings as keyword arguments, which it declares with :func:`takes`. A function in a user's file takes
the group ``algorithm`` as its second argument, unless it declares settings too (docs/algorithms/custom.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.config import choices
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.plugins import registering

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.masking import OwnedRows
    from rlhf_mcore.config.schema import AlgorithmConfig
    from rlhf_mcore.config.schema.group import Group
    from rlhf_mcore.types import Field, TrainBatch

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class AdvantageInputs:
    """The responses of a step, in any order.

    Tensors [N] contain the tokens of the rows that this rank owns, back to back. Tensors [B] contain one value per row of the step.
    Values outside ``loss_mask`` are arbitrary. ``rows`` computes the sums per row that estimators need.
    """

    rewards: Tensor  # [N] float64: after shaping, including the KL penalty if it is part of the reward
    loss_mask: Tensor  # [N] bool: trainable tokens
    rows: OwnedRows
    group_ids: Tensor  # [B] int64: equal for the responses to one prompt
    truncated: Tensor  # [B] bool: the token limit ended the response, not the policy
    old_values: Tensor | None = None  # [N] float32: value of the state before a token; None without a critic
    # [B] float32: value of the state after the last token; None without bootstrap_truncated
    bootstrap_values: Tensor | None = None
    baselines: Tensor | None = None  # [B] float64: the score of the greedy response to the same prompt
    score_parts: Tensor | None = None  # [B, K] float64: the parts of the scores that algorithm.reward_weights names
    fields: Mapping[str, Field] = field(
        default_factory=dict
    )  # [N, ...] by name: the fields that the estimator ``reads``


@dataclass(slots=True)
class Advantages:
    """The result of an estimator, zero outside the loss mask."""

    advantages: Tensor  # [N] float32
    returns: Tensor | None = None  # [N] float32: the targets of the critic


@dataclass(slots=True)
class LossInputs:
    """The tokens of a microbatch: tensors of the same shape, packed [1, N] or padded [b, T].

    Outside ``mask`` the weights are 0, and other tensors contain arbitrary values. Inside, ``weights`` include the division by the
    counts of the whole minibatch and the rollout correction, which may be 0. A microbatch contains only whole sequences.
    """

    logprobs: Tensor  # current, differentiable
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor  # bool: trainable tokens
    weights: Tensor
    sequence_ids: Tensor  # int64: index of a token's sequence in the microbatch, 0 <= id < num_sequences
    num_sequences: int
    # The fields that the loss ``reads``, by name: [..., k] or ragged.
    fields: Mapping[str, Field] = field(default_factory=dict)


AdvantageEstimator = Callable[[AdvantageInputs, "AlgorithmConfig"], Advantages]
# Returns the tokens' differentiable share of the loss, and detached scalar sums over the trainable tokens for metrics.
PolicyLoss = Callable[[LossInputs], "tuple[Tensor, dict[str, Tensor]]"]

ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}
# Policy losses; each also takes the settings that it declares with ``takes``.
POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {}

# Decorators that register a function under its name in ``algorithm.advantage`` or ``algorithm.policy_loss``.
advantage_estimator = registering(ADVANTAGE_ESTIMATORS, choices.ADVANTAGES)
policy_loss = registering(POLICY_LOSSES, choices.POLICY_LOSSES)


def reads(*names: str) -> Callable[[F], F]:
    """Declare further token fields that a loss or an estimator needs: ``@reads("teacher_logprobs")``.

    They are passed in ``fields`` of its inputs. Engines record these fields, roles compute them, or they are optional fields of
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
    """Return a loss that takes only its inputs. Its settings are read from ``group`` once, here.

    A function that declares no settings, such as a function in a user's file, gets the whole group as its second argument.
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
    """Return the field names that a function declares with ``reads``."""
    return getattr(function, "reads", ())


def pick_fields(batch: TrainBatch, function: Callable[..., Any], chosen_by: str) -> dict[str, Field]:
    """Return the fields of a batch that a function reads.

    Raises:
        ConfigError: the batch lacks a field; the message names ``chosen_by``, the setting that chooses the function.
    """
    try:
        return {name: batch.field_of_tokens(name) for name in fields_read(function)}
    except KeyError as error:
        there = ", ".join(batch.fields) or "none"
        raise ConfigError(
            f"{chosen_by} needs the field {error.args[0]!r} of every token, but no role of this run computes it and no engine records "
            f"it (available: {there}); choose another function, or configure the role that computes it"
        ) from None
