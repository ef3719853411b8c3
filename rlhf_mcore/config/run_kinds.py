"""Describe what the kinds of run differ in: ``algorithm.kind`` is looked up here, once; all else reads the description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config

# Beginnings of keys that are read by generating runs alone.
_GENERATION = (
    "rollout.",
    "bridge.",
    "reward.",
    "environment.",
    "critic.",
    "reference.",
    "teacher.",
    "algorithm.advantage",
    "algorithm.policy_loss",
)


@dataclass(frozen=True, slots=True)
class RunKind:
    """Declare what a kind of run reads, trains and saves."""

    name: str  # of algorithm.kind
    purpose: str  # for the documentation
    generates: bool  # it learns from responses of engines, with scores; false: from responses in its data
    head: str  # of the model it trains: lm | sequence
    starting_heads: tuple[str, ...]  # of what model.path may name
    saved_as: str  # the model's directory in a checkpoint
    response_keys: tuple[str, ...] = ()  # keys that name the columns of an example's responses, where these are given
    compares: bool = False  # a loss of algorithm.dpo compares the policy with a reference, or with itself

    @property
    def rows_per_example(self) -> int:
        """Sequences that one example is: one for each of its responses."""
        return max(len(self.response_keys), 1)

    @property
    def reads_conversations(self) -> bool:
        """Tell whether a column of messages may stand for the prompt and its only response."""
        return len(self.response_keys) == 1

    def reads(self, key: str) -> bool:
        """Tell whether a run of this kind looks at a key at all."""
        if self.compares and key.startswith("reference."):
            return True
        return self.generates or not key.startswith(_GENERATION)


RL = RunKind("rl", "", generates=True, head="lm", starting_heads=("lm",), saved_as="actor")
SFT = RunKind(
    "sft",
    "imitate given responses",
    generates=False,
    head="lm",
    starting_heads=("lm",),
    saved_as="actor",
    response_keys=("data.response_key",),
)
REWARD_MODEL = RunKind(
    "reward_model",
    "tell chosen from rejected responses",
    generates=False,
    head="sequence",
    starting_heads=("lm", "sequence"),
    saved_as="reward",
    response_keys=("data.chosen_key", "data.rejected_key"),
)
DPO = RunKind(
    "dpo",
    "prefer chosen to rejected responses",
    generates=False,
    head="lm",
    starting_heads=("lm",),
    saved_as="actor",
    response_keys=("data.chosen_key", "data.rejected_key"),
    compares=True,
)
RUN_KINDS = {kind.name: kind for kind in (RL, SFT, REWARD_MODEL, DPO)}


def run_kind(cfg: Config) -> RunKind:
    """Return the kind of a configuration's run. A name that is no choice is validation's to refuse; until then it counts as "rl"."""
    return RUN_KINDS.get(cfg.algorithm.kind, RL)
