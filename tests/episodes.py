"""Trajectories of one response, and examples, from plain lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_mcore.data import episodes
from rlhf_mcore.data.examples import TokenizedExample
from rlhf_mcore.types import Completion, Prompt, Trajectory


def single_turn(
    prompt: Prompt,
    sample: int,
    response_ids: Sequence[int],
    logprobs: Sequence[float],
    response_text: str,
    finish_reason: str,
    policy_version: int,
) -> Trajectory:
    """As an engine would have drawn it with one policy."""
    completion = Completion(
        0, np.array(response_ids, np.int32), np.array(logprobs, np.float32), ((0, policy_version),), finish_reason
    )
    return episodes.episode(prompt, sample, [completion], response_text)


def tokenized(prompt_ids: Sequence[int], *responses: Sequence[int]) -> TokenizedExample:
    """A prompt and its responses."""
    return TokenizedExample("", np.array(prompt_ids, np.int32), [np.array(ids, np.int32) for ids in responses])
