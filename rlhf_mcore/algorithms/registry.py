"""Find functions by their names in a configuration: in this package, or in a user's file (``path/to/file.py:name``)."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, TypeVar

# Importing a module adds its functions to the tables.
from rlhf_mcore.algorithms import advantages, covariance, kl, policy_loss, returns  # noqa: F401
from rlhf_mcore.algorithms.interfaces import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    PolicyLoss,
    bind,
)
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.user_functions import is_file_spec, load_function

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import AlgorithmConfig

F = TypeVar("F")


def find_advantage_estimator(name: str) -> AdvantageEstimator:
    """Return the estimator that ``algorithm.advantage`` names. If it is in a user's file, the file is executed once, here.

    Raises:
        ConfigError: the name is unknown, or the file is missing, raises an error or lacks the function.
    """
    function = _find(ADVANTAGE_ESTIMATORS, name, "algorithm.advantage")
    return _with_checks(function, name) if is_file_spec(name) else function


def find_policy_loss(cfg: AlgorithmConfig) -> PolicyLoss:
    """Return the loss that ``algorithm.policy_loss`` names, with its settings bound.

    Raises:
        ConfigError: as in :func:`find_advantage_estimator`.
    """
    return bind(_find(POLICY_LOSSES, cfg.policy_loss, "algorithm.policy_loss"), cfg)


def _find(table: dict[str, F], name: str, key: str) -> F:
    if is_file_spec(name):
        return load_function(name, key)  # type: ignore[return-value]
    if name not in table:
        raise ConfigError(f"{key}={name!r} is unknown; choose one of: {', '.join(table)}, or path/to/file.py:name")
    return table[name]


def _with_checks(function: AdvantageEstimator, name: str) -> AdvantageEstimator:
    """Wrap a user's estimator to check its result at once."""

    @wraps(function)
    def estimate(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
        result = function(inputs, cfg)
        if not isinstance(result, Advantages):
            raise ValueError(f"algorithm.advantage={name} returned {type(result).__name__}; return an Advantages")
        for part in ("advantages", "returns"):
            tensor = getattr(result, part)
            if tensor is not None and tensor.shape != inputs.rewards.shape:
                shapes = f"{list(tensor.shape)}, not {list(inputs.rewards.shape)}"
                raise ValueError(
                    f"algorithm.advantage={name} returned {part} of shape {shapes}; return one value per token"
                )
        return result

    return estimate
