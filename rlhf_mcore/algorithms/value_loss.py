"""A critic's loss, its explained variance, and the normalisation of its targets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.algorithms.kl import at_least_float32
from rlhf_mcore.algorithms.masking import weighted_sum
from rlhf_mcore.config.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.algorithms.masking import OwnedRows


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the squared error of the values, clipped around the old values (Schulman et al., OpenAI baselines ppo2; Engstrom et al.
    2020, arXiv 2005.12729, section 3).

    loss = 1/2 sum_t w_t max((V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, -clip, clip) - R_t)^2)

    Args:
        values: current, differentiable; padded [b, T] or packed [1, N].
        old_values, returns, weights: same shape, constants. Positions with weight 0 affect neither loss nor gradient.
        clip: largest change from the old value that reduces the loss; None: the plain squared error.

    Returns:
        The tokens' scalar share of the loss, and detached sums over the tokens with a weight above 0: ``clip_fraction`` (tokens whose
        gradient the bound removes) and ``values``.
    """
    trainable = weights > 0
    current = torch.where(trainable, at_least_float32(values), 0)
    targets = torch.where(trainable, returns, 0)
    losses = (current - targets).square()
    outside = torch.zeros_like(trainable)
    if clip is not None:
        old = torch.where(trainable, old_values, 0)
        bounded = (old + (current - old).clamp(-clip, clip) - targets).square()
        outside = (bounded > losses) & ((current - old).abs() > clip)
        losses = torch.maximum(losses, bounded)
    metrics = {"clip_fraction": outside.sum().float(), "values": current.detach().sum()}
    return 0.5 * weighted_sum(losses, weights), metrics


@torch.no_grad()
def explained_variance_sums(values: Tensor, returns: Tensor, mask: Tensor, rows: OwnedRows) -> dict[str, float]:
    """Return the sums that :func:`explained_variance` needs, over the tokens in ``mask`` of all rows.

    ``values``, ``returns`` and ``mask`` are [N], for the rows that this rank owns.
    """
    target = torch.where(mask, returns, 0).double()
    error = target - torch.where(mask, values, 0).double()
    columns = {
        "count": torch.ones_like(target),
        "returns": target,
        "returns_squared": target.square(),
        "errors": error,
        "errors_squared": error.square(),
    }
    return {name: float(rows.sums(column, mask).sum()) for name, column in columns.items()}


def explained_variance(sums: Mapping[str, float]) -> float:
    """Compute 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a critic that predicts only the mean.

    The result is 0 if the returns do not vary.
    """
    count = max(sums["count"], 1.0)
    variance = sums["returns_squared"] / count - (sums["returns"] / count) ** 2
    unexplained = sums["errors_squared"] / count - (sums["errors"] / count) ** 2
    # If the returns are equal, the subtraction leaves only rounding errors.
    if variance <= 1e-12 * max(sums["returns_squared"] / count, 1e-30):
        return 0.0
    return 1.0 - unexplained / variance


# Returns further than this many spreads from the centre are clamped, so that one reward of 1e38 cannot dominate all later divisors.
MAX_DEVIATIONS = 100.0


@dataclass(slots=True)
class ReturnNormalizer:
    """The running mean and deviation of the returns, so that a critic predicts normalised values (value whitening).

    The critic's outputs are ``denormalize``d before advantages are computed, and its targets are ``normalize``d. The moments include
    all returns so far (Chan et al. 1983), not only the last step, so that predictions of different steps are comparable (Yu et al.
    2022, MAPPO, arXiv 2103.01955, section 3). Before the first update both functions are the identity.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    @property
    def deviation(self) -> float:
        variance = self.squares / self.count if self.count else 1.0
        return math.sqrt(variance) if variance > 1e-12 else 1.0

    def update(self, returns: Tensor, mask: Tensor, rows: OwnedRows) -> None:
        """Add the returns [N] of a step in the bool mask, for the rows that this rank owns. The moments include all rows.

        Returns that are not finite are skipped. Returns further than ``MAX_DEVIATIONS`` spreads from the centre are clamped. The
        centre is the median of the rows' means. The spread is the distance that includes three quarters of the rows, or the running
        deviation if it is larger.
        """
        mask = mask & returns.isfinite()
        counts = rows.sums(torch.ones_like(returns), mask)
        has_tokens = counts > 0
        if not has_tokens.any():
            return
        centre = (rows.sums(returns, mask)[has_tokens] / counts[has_tokens]).median()
        smallest, largest = (extremes[has_tokens] for extremes in rows.extremes(returns, mask))
        distances = torch.maximum(largest - centre, centre - smallest)
        spread = max(float(distances.kthvalue(math.ceil(0.75 * len(distances))).values), self.deviation)
        inside = returns.double().clamp(centre - MAX_DEVIATIONS * spread, centre + MAX_DEVIATIONS * spread)
        count = float(counts.sum())
        mean = float(rows.sums(inside, mask).sum()) / count
        distance, total = mean - self.mean, self.count + count
        squares = float(rows.sums((inside - mean).square(), mask).sum())
        self.squares += squares + distance**2 * self.count * count / total
        self.mean += distance * count / total
        self.count = total

    def normalize(self, returns: Tensor) -> Tensor:
        return (returns - self.mean) / self.deviation

    def denormalize(self, values: Tensor) -> Tensor:
        return values * self.deviation + self.mean

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state of :meth:`state_dict`.

        Raises:
            ConfigError: the state has other keys.
        """
        names = {field.name for field in fields(self)}
        if set(state) != names:
            raise ConfigError(
                f"the state of the return normalizer has the keys {sorted(state)}, expected {sorted(names)}"
            )
        for name in names:
            setattr(self, name, float(state[name]))
