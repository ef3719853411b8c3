"""Sampled episodes as records, and their tokens as the flat tensors that travel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_mcore.types import Completion, Prompt, Trajectory, Turn


def single_turn(prompt: Prompt, sample: int, completion: Completion, response_text: str) -> Trajectory:
    """A prompt and one response to it.

    Raises:
        ValueError: the prompt has no tokens, so that nothing predicts the first token of the response; or the number of logprobs is
            not that of the response's tokens.
    """
    response_ids, logprobs = completion.token_ids, completion.logprobs
    start, stop = len(prompt.prompt_ids), len(prompt.prompt_ids) + len(response_ids)
    where = f"prompt {prompt.prompt_id!r}, sample {sample}"
    if not start:
        raise ValueError(f"{where}: the prompt has no tokens, so the first response token cannot be predicted")
    if len(logprobs) != len(response_ids):
        raise ValueError(f"{where}: the engine gave {len(logprobs)} logprobs for {len(response_ids)} response tokens")
    return Trajectory(
        prompt,
        sample,
        token_ids=np.concatenate([np.asarray(prompt.prompt_ids, np.int32), response_ids]),
        loss_mask=np.arange(stop) >= start,
        logprobs=np.concatenate([np.zeros(start, np.float32), logprobs]),
        turns=(Turn("prompt", 0, start), Turn("policy", start, stop)),
        versions=tuple((start + first, version) for first, version in completion.versions),
        response_text=response_text,
        finish_reason=completion.finish_reason,
    )


def flat_fields(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """``token_ids`` int32, ``loss_mask`` bool and ``rollout_logprobs`` float32 of trajectories, back to back: [N] each."""
    token_ids = np.concatenate([np.zeros(0, np.int32), *(t.token_ids for t in trajectories)])
    loss_mask = np.concatenate([np.zeros(0, np.bool_), *(t.loss_mask for t in trajectories)])
    logprobs = np.concatenate([np.zeros(0, np.float32), *(t.logprobs for t in trajectories)])
    tensors = {"token_ids": token_ids, "loss_mask": loss_mask, "rollout_logprobs": logprobs}
    return {name: torch.from_numpy(values) for name, values in tensors.items()}
