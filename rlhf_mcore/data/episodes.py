"""Sampled episodes as records, and their tokens as the flat tensors that ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.types import Completion, Prompt, Ragged, Recorded, Trajectory, Turn


def episode(
    prompt: Prompt,
    sample: int,
    written: Sequence[Completion | NDArray[np.int32]],
    response_text: str,
    rewards: Sequence[float] = (),
) -> Trajectory:
    """Build a trajectory from a prompt and the parts after it: completions of the policy and tokens [n] of the environment, in order.

    ``rewards``: one for each completion, if turns have their own.

    Raises:
        ValueError: the prompt has no tokens, so that nothing predicts the first token of the policy; a completion has another number
            of logprobs, or values of another recorded field, than of tokens; or completions have different fields.
    """
    where = f"prompt {prompt.prompt_id!r}, sample {sample}"
    stop = len(prompt.prompt_ids)
    if not stop:
        raise ValueError(f"{where}: the prompt has no tokens, so the first response token cannot be predicted")
    tokens, logprobs = [np.array(prompt.prompt_ids, np.int32)], [np.zeros(stop, np.float32)]
    given = iter(rewards)
    turns, versions, finish_reason = [Turn("prompt", 0, stop)], list[tuple[int, int]](), ""
    num_prefilled = num_cached = 0
    for part in written:
        if isinstance(part, Completion):
            ids, values, writer, finish_reason = part.token_ids, part.logprobs, "policy", part.finish_reason
            if len(values) != len(ids):
                raise ValueError(f"{where}: the engine gave {len(values)} logprobs for {len(ids)} response tokens")
            versions += [(stop + first, version) for first, version in part.versions]
            if part.num_cached is not None:
                num_prefilled, num_cached = num_prefilled + stop, num_cached + part.num_cached
        else:
            ids, values, writer = part, np.zeros(len(part), np.float32), "environment"
        start, stop = stop, stop + len(ids)
        turns.append(Turn(writer, start, stop, next(given, 0.0) if writer == "policy" else 0.0))
        tokens.append(ids)
        logprobs.append(values)
    support, fields = None, dict[str, Recorded]()
    if any(isinstance(part, Completion) and (part.support is not None or part.fields) for part in written):
        from rlhf_mcore.data.recorded import join_fields, join_support

        num_given = len(prompt.prompt_ids)
        support, fields = join_support(num_given, written), join_fields(where, num_given, written)
    return Trajectory(
        prompt,
        sample,
        token_ids=np.concatenate(tokens),
        loss_mask=np.concatenate([np.full(t.stop - t.start, t.writer == "policy") for t in turns]),
        logprobs=np.concatenate(logprobs),
        turns=tuple(turns),
        versions=tuple(versions),
        response_text=response_text,
        finish_reason=finish_reason,
        num_prefilled=num_prefilled,
        num_cached=num_cached,
        support=support,
        fields=fields,
    )


def flat_fields(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return ``token_ids`` int32, ``loss_mask`` bool and ``rollout_logprobs`` float32 of trajectories, back to back: [N] each."""
    token_ids = np.concatenate([np.zeros(0, np.int32), *(t.token_ids for t in trajectories)])
    loss_mask = np.concatenate([np.zeros(0, np.bool_), *(t.loss_mask for t in trajectories)])
    logprobs = np.concatenate([np.zeros(0, np.float32), *(t.logprobs for t in trajectories)])
    tensors = {"token_ids": token_ids, "loss_mask": loss_mask, "rollout_logprobs": logprobs}
    return {name: torch.from_numpy(values) for name, values in tensors.items()}


def flat_support(trajectories: Sequence[Trajectory]) -> Ragged[Tensor]:
    """Return the support of trajectories back to back; tokens of a trajectory without one have no ids."""
    none = np.zeros(0, np.int32)
    counts = [np.zeros(len(t.token_ids), np.int32) if t.support is None else t.support.counts for t in trajectories]
    values = [none if t.support is None else t.support.values for t in trajectories]
    return Ragged(*(torch.from_numpy(np.concatenate([none, *parts])) for parts in (counts, values)))
