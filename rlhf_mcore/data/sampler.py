"""The order of training prompts, which can be resumed at any prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rlhf_mcore.config.errors import ConfigError


class PromptSampler:
    """Samples batches of indices 0 <= i < num_prompts, epoch after epoch, with a different order in each epoch.

    A batch may span two epochs, so that no prompt is skipped. It may then contain a prompt twice. The order of an epoch
    depends only on (seed, epoch), and the state is a single count, so a run may resume with another batch size.
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
        """Epoch of the next prompt, from 0."""
        return self._num_drawn // self.num_prompts

    @property
    def num_drawn(self) -> int:
        """Number of prompts sampled so far."""
        return self._num_drawn

    @property
    def num_epochs(self) -> float:
        """Number of passes over all prompts so far."""
        return self._num_drawn / self.num_prompts

    def next_batch(self) -> list[int]:
        """Return the indices of the next ``batch_size`` prompts."""
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
        """Return the position in the order and the parameters of the order, as plain JSON values."""
        return {
            "num_drawn": self._num_drawn,
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``.

        Raises:
            ConfigError: keys are missing or unknown, or the data, the seed or the shuffling has changed.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ConfigError(f"sampler state contains the keys {sorted(state)}, expected {sorted(own)}")
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
    """Samples batches from several data sets in fixed proportions. Each data set has its own epochs and orders.

    The next prompt comes from the data set that is furthest below its share. This is deterministic. After any number of
    samples, each data set is within one or two prompts of its share.

    Args:
        sizes: number of prompts of each data set. Indices count through all data sets in order.
        weights: their shares, in any unit.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float], batch_size: int, seed: int, shuffle: bool
    ) -> None:
        for number, size in enumerate(sizes):
            if size < 1:
                raise ConfigError(
                    f"data.train[{number}] has no prompts left to sample; remove the file and its data.weights"
                )
        total = sum(weights)
        self.batch_size = batch_size
        self._shares = [weight / total for weight in weights]
        self._first = [sum(sizes[:number]) for number in range(len(sizes))]
        # A separate seed for each data set, so that data sets with the same size get different orders.
        self._parts = [PromptSampler(size, 1, seed + (number << 32), shuffle) for number, size in enumerate(sizes)]

    @property
    def num_epochs(self) -> float:
        """Sampled prompts divided by all prompts. A data set with a large share has more epochs of its own."""
        return sum(part.num_drawn for part in self._parts) / sum(part.num_prompts for part in self._parts)

    def next_batch(self) -> list[int]:
        """Return the indices of the next ``batch_size`` prompts."""
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
        """Resume from ``state``. The shares may have changed. The new shares apply from now on.

        Raises:
            ConfigError: the number of data sets or one of the data sets has changed.
        """
        parts = state["parts"]
        _ = state["shares"]
        if len(parts) != len(self._parts):
            raise ConfigError(
                f"cannot resume: data.train had {len(parts)} files, now {len(self._parts)}; restore them, or start a new experiment"
            )
        for state_of_part, part in zip(parts, self._parts, strict=True):
            part.load_state_dict(state_of_part)


Sampler: TypeAlias = PromptSampler | WeightedSampler


def epoch_order(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation [num_prompts] that is a pure function of its arguments.

    Prompts are sorted by raw words of the counter-based generator Philox4x64-10 (Salmon et al. 2011, "Parallel random
    numbers: as easy as 1, 2, 3") keyed with (seed, epoch). The paper fixes the raw words, whereas the shuffles of
    numpy and torch may change with their versions.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_prompts)
    return np.argsort(words, kind="stable")
