"""Define what some runs know of tokens beside their ids and logprobs, as flat tensors that ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlhf_mcore.data.recorded import join_recorded
from rlhf_mcore.types import Field, Ragged, Trajectory


def recorded_fields(trajectories: Sequence[Trajectory]) -> dict[str, Field]:
    """Return the fields that engines recorded of the tokens of trajectories, back to back, by name: [N, ...], or ragged.

    Raises:
        ValueError: two trajectories do not have the same fields.
    """
    names = trajectories[0].fields.keys() if trajectories else ()
    if other := next((t for t in trajectories if t.fields.keys() != names), None):
        raise ValueError(
            f"prompt {other.prompt.prompt_id!r}, sample {other.sample}: engines recorded {sorted(other.fields)} of its tokens, and "
            f"{sorted(names)} of others"
        )
    fields: dict[str, Field] = {}
    for name in names:
        joined = join_recorded([t.fields[name] for t in trajectories])
        if isinstance(joined, Ragged):
            fields[name] = Ragged(torch.from_numpy(joined.counts), torch.from_numpy(joined.values))
        else:
            fields[name] = torch.from_numpy(joined)
    return fields


def token_versions(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the version of the policy that sampled each token, zero for other tokens, of trajectories back to back: [N] int32."""
    flat, start = np.zeros(sum(len(t.token_ids) for t in trajectories), np.int32), 0
    for trajectory in trajectories:
        stop = start + len(trajectory.token_ids)
        # Each version lasts until the next one begins.
        for first, version in trajectory.versions:
            flat[start + first : stop] = version
        flat[start:stop][~trajectory.loss_mask] = 0
        start = stop
    return torch.from_numpy(flat)


def turn_rewards(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the rewards of turns at the last token of each, else zero, of trajectories back to back: [N] float32."""
    flat, start = np.zeros(sum(len(t.token_ids) for t in trajectories), np.float32), 0
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.reward:
                flat[start + turn.stop - 1] = turn.reward
        start += len(trajectory.token_ids)
    return torch.from_numpy(flat)
