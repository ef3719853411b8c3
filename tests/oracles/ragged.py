"""Batches of responses of different lengths, as tensors [B, T] with a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mcore.algorithms.interfaces import AdvantageInputs, LossInputs
from tests.rows import advantage_inputs, token_weights

LENGTHS = [1, 7, 3, 9, 2, 5, 8, 4]
WIDTH = 9
AGGREGATIONS = {  # ours -> verl's
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
CONSTANT_LENGTH = 11
FAR = 50.0


@dataclass
class Ragged:
    """Eight responses to four prompts, in double precision, so that rounding does not matter."""

    seed: int
    spread: float = 0.3  # standard deviation of log ratios

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        shape = (len(LENGTHS), WIDTH)
        self.mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
        self.groups = torch.tensor([0, 1, 1, 0, 2, 3, 2, 3])
        self.old = -normal(*shape).abs() - 0.1
        self.new = self.old + self.spread * normal(*shape)
        self.ref = self.new + self.spread * normal(*shape)
        self.rollout = self.old + self.spread * normal(*shape)
        self.advantages = normal(*shape)
        self.rewards = torch.where(self.mask, normal(*shape), 0)
        self.values = torch.where(self.mask, normal(*shape), 0)
        self.returns = normal(*shape)

    @property
    def floats(self) -> Tensor:
        """Return the mask as floats, the type in verl and TRL."""
        return self.mask.double()

    def far_apart(self) -> Ragged:
        """Set log ratios to the old policy and to the reference to +-50, in pairs, so that the mean of a sequence is unchanged."""
        for row, length in enumerate(LENGTHS):
            if length >= 3:
                self.new[row, 1:3] += torch.tensor([FAR, -FAR] if row % 2 else [-FAR, FAR])
        self.ref = self.new + self.spread * torch.sin(torch.arange(float(WIDTH)))
        self.ref[1, 3] = self.new[1, 3] + FAR
        self.ref[3, 4] = self.new[3, 4] - FAR
        self.ref[0, 0] = self.new[0, 0] + 12
        return self

    def weights(self, aggregation: str) -> Tensor:
        made = token_weights(
            self.mask,
            aggregation,
            num_tokens=sum(LENGTHS),
            num_rows=len(LENGTHS),
            constant_length=CONSTANT_LENGTH,
        )
        return made.double()

    def loss_inputs(self, logprobs: Tensor, aggregation: str, correction: Tensor | None = None) -> LossInputs:
        weights = self.weights(aggregation) if correction is None else self.weights(aggregation) * correction
        ids = torch.arange(len(LENGTHS))[:, None].expand(logprobs.shape)
        return LossInputs(logprobs, self.old, self.advantages, self.mask, weights, ids, len(LENGTHS))

    def advantage_inputs(self) -> AdvantageInputs:
        cut = torch.zeros(len(LENGTHS), dtype=torch.bool)
        return advantage_inputs(self.rewards.float(), self.mask, self.groups, cut, self.values.float())


def leaf(values: Tensor) -> Tensor:
    """Return a copy that requires a gradient."""
    return values.detach().clone().requires_grad_()
