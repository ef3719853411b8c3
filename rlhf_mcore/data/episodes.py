"""Sampled episodes as records, and their tokens as the flat tensors that travel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.types import Prompt, Trajectory, Turn


def single_turn(
    prompt: Prompt,
    sample: int,
    response_ids: Sequence[int] | NDArray[np.int32],
    logprobs: Sequence[float] | NDArray[np.float32],
    response_text: str,
    finish_reason: str,
    policy_version: int,
) -> Trajectory:
    """A prompt and one response to it.

    Raises:
        ValueError: the prompt has no tokens, so that nothing predicts the first token of the response; or the number of logprobs is
            not that of the response's tokens.
    """
    start, stop = len(prompt.prompt_ids), len(prompt.prompt_ids) + len(response_ids)
    where = f"prompt {prompt.prompt_id!r}, sample {sample}"
    if not start:
        raise ValueError(f"{where}: the prompt has no tokens, so the first response token cannot be predicted")
    if len(logprobs) != len(response_ids):
        raise ValueError(f"{where}: the engine gave {len(logprobs)} logprobs for {len(response_ids)} response tokens")
    values = np.zeros(stop, dtype=np.float32)
    values[start:] = logprobs
    return Trajectory(
        prompt,
        sample,
        token_ids=np.concatenate([np.asarray(part, dtype=np.int32) for part in (prompt.prompt_ids, response_ids)]),
        loss_mask=np.arange(stop) >= start,
        logprobs=values,
        turns=(Turn("prompt", 0, start), Turn("policy", start, stop)),
        versions=((start, policy_version),),
        response_text=response_text,
        finish_reason=finish_reason,
    )


def flat_fields(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """``token_ids`` int32, ``loss_mask`` bool and ``rollout_logprobs`` float32 of trajectories, back to back: [N] each."""
    token_ids = np.concatenate([np.zeros(0, np.int32), *(t.token_ids for t in trajectories)])
    loss_mask = np.concatenate([np.zeros(0, np.bool_), *(t.loss_mask for t in trajectories)])
    logprobs = np.concatenate([np.zeros(0, np.float32), *(t.logprobs for t in trajectories)])
    tensors = {"token_ids": token_ids, "loss_mask": loss_mask, "rollout_logprobs": logprobs}
    return {name: torch.from_numpy(values) for name, values in tensors.items()}
