"""Responses without a score: how many there may be, and what becomes of them. Every rank decides alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_mcore.config.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RewardConfig
    from rlhf_mcore.types import Prompt

REMEDY = "Correct the reward, or raise reward.max_error_share"


@dataclass(frozen=True, slots=True)
class OnError:
    """Choose what a step makes of responses without a score: they count as 0, or with ``drop`` their prompts leave the step.

    ``max_share``: of the responses of a step, over all ranks. A reward that fails by ``reward.on_error: fail`` never comes so far.
    """

    drop: bool = False
    max_share: float = 1.0

    @classmethod
    def of(cls, cfg: RewardConfig) -> OnError:
        return cls(cfg.on_error == "drop", 1.0 if cfg.on_error == "fail" else cfg.max_error_share)

    def refuse_too_many(self, failed: int, total: int, first: str) -> None:
        """Raises ConfigError where more than the allowed share of ``total`` responses has no score. ``first``: the first cause."""
        if failed > self.max_share * total:
            raise ConfigError(
                f"{failed} of {total} responses got no score, more than reward.max_error_share={self.max_share:g}; the first: "
                f"{first}. {REMEDY}"
            )

    def left(self, prompts: Sequence[Prompt], failed: set[int], first: str) -> list[int]:
        """Return the places of the prompts that stay in a step. ``failed``: places of those that have a response without a score.

        Raises:
            ConfigError: none would stay.
        """
        kept = [place for place in range(len(prompts)) if not (self.drop and place in failed)]
        if prompts and not kept:
            raise ConfigError(
                f"each of the {len(prompts)} prompts of a step has a response without a score, so that reward.on_error=drop leaves "
                f"nothing to learn from; the first: {first}. Correct it"
            )
        return kept
