"""Declarations of the kinds of run. Only this module compares values of ``algorithm.kind``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config

# Beginnings of the keys that only generating runs read.
_GROUPS = ("rollout.", "bridge.", "reward.", "environment.", "critic.", "reference.", "teacher.")
_GENERATION = (*_GROUPS, "algorithm.advantage", "algorithm.policy_loss")


@dataclass(frozen=True, slots=True)
class RunKind:
    """A kind of run: the keys that it reads, the model that it trains and the directory that it saves."""

    name: str  # the value of algorithm.kind
    generates: bool  # learns from responses of engines; false: from responses in the data
    head: str  # head of the trained model: lm | sequence
    starting_heads: tuple[str, ...]  # heads that the model in model.path may have
    saved_as: str  # the model's directory in a checkpoint
    response_keys: tuple[str, ...] = ()  # keys that name the columns of an example's responses
    compares: bool = False  # uses a loss of algorithm.dpo

    @property
    def rows_per_example(self) -> int:
        """Return the sequences of one example: one for each of its responses."""
        return max(len(self.response_keys), 1)

    @property
    def reads_conversations(self) -> bool:
        """Return whether a column of messages can replace the prompt and its only response."""
        return len(self.response_keys) == 1

    def reads(self, key: str) -> bool:
        """Return whether a run of this kind reads a key."""
        if self.compares and key.startswith("reference."):
            return True
        return self.generates or not key.startswith(_GENERATION)


_PAIR = ("data.chosen_key", "data.rejected_key")
RL = RunKind("rl", True, "lm", ("lm",), "actor")
SFT = RunKind("sft", False, "lm", ("lm",), "actor", ("data.response_key",))
REWARD_MODEL = RunKind("reward_model", False, "sequence", ("lm", "sequence"), "reward", _PAIR)
DPO = RunKind("dpo", False, "lm", ("lm",), "actor", _PAIR, compares=True)
RUN_KINDS = {kind.name: kind for kind in (RL, SFT, REWARD_MODEL, DPO)}


def run_kind(cfg: Config) -> RunKind:
    """Return the kind of a configuration's run. An unknown name counts as "rl"; validation rejects it."""
    return RUN_KINDS.get(cfg.algorithm.kind, RL)
