"""An environment with several turns. The policy guesses a number and reads whether the number is higher or lower."""

from __future__ import annotations

import random
from typing import Any


class GuessTheNumber:
    """The number is from 1 to ``highest``, and the same for all responses to a prompt in a step."""

    def __init__(self, highest: int = 7) -> None:
        self.highest = highest

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Choose a number."""
        self.number = random.Random(seed).randint(1, self.highest)

    def step(self, action: str) -> tuple[str | None, float, bool]:
        """Answer a guess. Returns (answer, reward, whether the episode ends)."""
        guess = action.strip()
        if guess == str(self.number):
            return None, 1.0, True
        return "higher" if guess.isdigit() and int(guess) < self.number else "lower", 0.0, False
