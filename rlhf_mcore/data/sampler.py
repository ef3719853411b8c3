"""The order in which prompts are trained on, resumable at any prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlhf_mcore.config.errors import ConfigError


class PromptSampler:
    """Draws batches of positions 0 <= i < num_prompts, epoch after epoch, each epoch in an order of its own.

    A batch may span two epochs, so that no prompt is skipped; it may then hold a prompt twice. The order of an epoch
    depends only on (seed, epoch), and the state is a single count, so a run may be resumed with another batch size.
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise ConfigError("data.train: there are no prompts to sample from; give files that have rows")
        if batch_size < 1:
            raise ConfigError(f"trainer.prompts_per_step={batch_size}: must be at least 1")
        if seed < 0:
            raise ConfigError(f"seed={seed}: must not be negative")
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._num_drawn = 0
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, from 0."""
        return self._num_drawn // self.num_prompts

    @property
    def num_drawn(self) -> int:
        """Prompts drawn so far."""
        return self._num_drawn

    @property
    def num_epochs(self) -> float:
        """Passes over all prompts so far."""
        return self._num_drawn / self.num_prompts

    def next_batch(self) -> list[int]:
        """Return the positions of the next ``batch_size`` prompts."""
        batch: list[int] = []
        while len(batch) < self.batch_size:
            start = self._num_drawn % self.num_prompts
            if (epoch := self.epoch) != self._epoch:
                in_file_order = np.arange(self.num_prompts)
                self._order = epoch_order(self.num_prompts, self.seed, epoch) if self.shuffle else in_file_order
                self._epoch = epoch
            part = self._order[start : start + self.batch_size - len(batch)]
            batch.extend(part.tolist())
            self._num_drawn += len(part)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order and the order's parameters, as plain JSON values."""
        return {
            "num_drawn": self._num_drawn,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            ConfigError: keys are missing or unknown, or the data, the seed or the shuffling have changed.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ConfigError(f"sampler state has the keys {sorted(state)}, expected {sorted(own)}")
        names = {"num_prompts": "the number of prompts in data.train", "seed": "seed", "shuffle": "data.shuffle"}
        for key, name in names.items():
            if state[key] != own[key]:
                raise ConfigError(
                    f"cannot resume: {name} was {state[key]} and is now {own[key]}; "
                    "restore it, or start a new experiment"
                )
        num_drawn = state["num_drawn"]
        if type(num_drawn) is not int or num_drawn < 0:
            raise ConfigError(f"sampler state: num_drawn={num_drawn!r} must be a count")
        self._num_drawn = num_drawn


class WeightedSampler:
    """Draws batches from several data sets, each in epochs and orders of its own, in fixed proportions.

    The next prompt comes from the data set that is furthest behind its share. This is deterministic: after any number of draws each
    data set has had its share, to a prompt or two.

    Args:
        sizes: prompts of each data set; positions count through all of them in order.
        weights: their shares, in any unit.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int, shuffle: bool
    ) -> None:
        for number, size in enumerate(sizes):
            if size < 1:
                raise ConfigError(
                    f"data.train[{number}] has no prompts left to draw; remove the file and its data.weights"
                )
        total = sum(weights)
        self.batch_size = batch_size
        self._shares = [weight / total for weight in weights]
        self._first = [sum(sizes[:number]) for number in range(len(sizes))]
        # Data sets of the same size get different orders.
        self._parts = [PromptSampler(size, 1, seed + (number << 32), shuffle) for number, size in enumerate(sizes)]

    @property
    def num_epochs(self) -> float:
        """Drawn prompts divided by all prompts. A data set with a large share has had more epochs of its own."""
        return sum(part.num_drawn for part in self._parts) / sum(part.num_prompts for part in self._parts)

    def next_batch(self) -> list[int]:
        """Return the positions of the next ``batch_size`` prompts."""
        batch, drawn = [], sum(part.num_drawn for part in self._parts)
        for due in range(drawn + 1, drawn + 1 + self.batch_size):
            behind = [share * due - part.num_drawn for share, part in zip(self._shares, self._parts, strict=True)]
            which = behind.index(max(behind))
            batch.append(self._first[which] + self._parts[which].next_batch()[0])
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the shares and the state of each data set, as plain JSON values."""
        return {"shares": self._shares, "parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. The shares may differ and apply from here on.

        Raises:
            ConfigError: the number of data sets has changed, or one of them has.
        """
        parts = state["parts"]
        _ = state["shares"]
        if len(parts) != len(self._parts):
            raise ConfigError(
                f"cannot resume: data.train had {len(parts)} files and has {len(self._parts)}; restore them, or start a new experiment"
            )
        for state_of_part, part in zip(parts, self._parts, strict=True):
            part.load_state_dict(state_of_part)


Sampler: TypeAlias = PromptSampler | WeightedSampler


def epoch_order(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation [num_prompts] that is a pure function of its arguments.

    Prompts are sorted by raw words of the counter-based generator Philox4x64-10 (Salmon et al. 2011, "Parallel random
    numbers: as easy as 1, 2, 3") keyed with (seed, epoch). Raw words are fixed by the paper, whereas the shuffles of
    numpy and torch may change with their versions.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_prompts)
    return np.argsort(words, kind="stable")
