"""Sampled episodes as records, the fields that engines recorded for their tokens, and both as flat tensors for the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.types import Completion, Field, Prompt, Ragged, Recorded, Trajectory, Turn


def episode(
    prompt: Prompt,
    sample: int,
    written: Sequence[Completion | NDArray[np.int32]],
    response_text: str,
    rewards: Sequence[float] = (),
) -> Trajectory:
    """Build a trajectory from a prompt and the parts after it: completions of the policy and environment tokens [n], in order.

    ``rewards`` contains a reward per completion, if turns have their own rewards.

    Raises:
        ValueError: the prompt has no tokens, so nothing predicts the first response token; the number of logprobs or of other
            recorded values differs from the number of tokens; or completions have different fields.
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
    """Return concatenated ``token_ids`` int32, ``loss_mask`` bool and ``rollout_logprobs`` float32 of trajectories: [N] each."""
    token_ids = np.concatenate([np.zeros(0, np.int32), *(t.token_ids for t in trajectories)])
    loss_mask = np.concatenate([np.zeros(0, np.bool_), *(t.loss_mask for t in trajectories)])
    logprobs = np.concatenate([np.zeros(0, np.float32), *(t.logprobs for t in trajectories)])
    tensors = {"token_ids": token_ids, "loss_mask": loss_mask, "rollout_logprobs": logprobs}
    return {name: torch.from_numpy(values) for name, values in tensors.items()}


def flat_support(trajectories: Sequence[Trajectory]) -> Ragged[Tensor]:
    """Return the concatenated support of trajectories. Tokens of a trajectory without support get no ids."""
    none = np.zeros(0, np.int32)
    counts = [np.zeros(len(t.token_ids), np.int32) if t.support is None else t.support.counts for t in trajectories]
    values = [none if t.support is None else t.support.values for t in trajectories]
    return Ragged(*(torch.from_numpy(np.concatenate([none, *parts])) for parts in (counts, values)))


def join_support(
    prompt_tokens: int, written: Sequence[Completion | NDArray[np.int32]]
) -> Ragged[NDArray[np.int32]] | None:
    """Join the support of the policy's tokens, empty for other tokens. Return None if a completion has no recorded support."""
    none = Ragged(np.zeros(0, np.int32), np.zeros(0, np.int32))
    parts: list[Recorded] = [blank_recorded(none, prompt_tokens)]
    for part in written:
        if not isinstance(part, Completion):
            parts.append(blank_recorded(none, len(part)))
        elif part.support is None:
            return None
        else:
            parts.append(part.support)
    joined = join_recorded(parts)
    assert isinstance(joined, Ragged)
    return joined


def join_fields(
    where: str, prompt_tokens: int, written: Sequence[Completion | NDArray[np.int32]]
) -> dict[str, Recorded]:
    """Join the fields that an engine recorded for the policy's tokens of an episode. Other tokens are blank.

    A later completion may contain values for earlier tokens. They fill the blanks.
    """
    completions = [part for part in written if isinstance(part, Completion)]
    names = completions[0].fields.keys() if completions else ()
    lengths = (len(part.token_ids if isinstance(part, Completion) else part) for part in written)
    stops = [*accumulate(lengths, initial=prompt_tokens)]
    drawn = [(part, stop) for part, stop in zip(written, stops[1:], strict=True) if isinstance(part, Completion)]
    for completion, stop in drawn:
        if completion.fields.keys() != names:
            raise ValueError(
                f"{where}: the engine recorded the fields {sorted(names)}, then {sorted(completion.fields)}"
            )
        for name, values in completion.fields.items():
            num_tokens = len(completion.token_ids)
            if _num_tokens(values) not in (num_tokens, num_tokens if isinstance(values, Ragged) else stop):
                raise ValueError(
                    f"{where}: the engine gave {name} for {_num_tokens(values)} tokens, not for {num_tokens} response tokens"
                )
    fields: dict[str, Recorded] = {}
    for name in names:
        like = completions[0].fields[name]
        if isinstance(like, Ragged):
            parts = [
                part.fields[name] if isinstance(part, Completion) else blank_recorded(like, len(part))
                for part in written
            ]
            fields[name] = join_recorded([blank_recorded(like, prompt_tokens), *parts])
        else:
            fields[name] = _overlay(
                blank_recorded(like, stops[-1]), [(part.fields[name], stop) for part, stop in drawn]
            )
    return fields


def _overlay(whole: Recorded, parts: Sequence[tuple[Recorded, int]]) -> Recorded:
    """Fill the blank tokens of ``whole`` from parts in order. Each part covers the tokens before its stop."""
    assert not isinstance(whole, Ragged)
    for values, stop in parts:
        assert not isinstance(values, Ragged)
        own = whole[stop - len(values) : stop]
        blank = ~own.any(axis=tuple(range(1, own.ndim)))
        own[blank] = values[blank]
    return whole


def _num_tokens(values: Recorded) -> int:
    return len(values.counts if isinstance(values, Ragged) else values)


def blank_recorded(like: Recorded, num_tokens: int) -> Recorded:
    """Return zeros for ``num_tokens`` tokens in the form of ``like``; for a ragged field, no values."""
    if isinstance(like, Ragged):
        return Ragged(np.zeros(num_tokens, np.int32), like.values[:0])
    return np.zeros((num_tokens, *like.shape[1:]), like.dtype)


def join_recorded(parts: Sequence[Recorded]) -> Recorded:
    """Concatenate the parts of a recorded field."""
    if isinstance(parts[0], Ragged):
        ragged = [part for part in parts if isinstance(part, Ragged)]
        return Ragged(
            np.concatenate([part.counts for part in ragged]), np.concatenate([part.values for part in ragged])
        )
    return np.concatenate([part for part in parts if not isinstance(part, Ragged)])


def recorded_fields(trajectories: Sequence[Trajectory]) -> dict[str, Field]:
    """Return the recorded fields of trajectories, concatenated, by name: [N, ...], or ragged.

    Raises:
        ValueError: two trajectories have different fields.
    """
    names = trajectories[0].fields.keys() if trajectories else ()
    if other := next((t for t in trajectories if t.fields.keys() != names), None):
        raise ValueError(
            f"prompt {other.prompt.prompt_id!r}, sample {other.sample}: engines recorded {sorted(other.fields)} for its tokens, and "
            f"{sorted(names)} for others"
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
    """Return the policy version that sampled each token, and zero for other tokens, of concatenated trajectories: [N] int32."""
    flat, start = np.zeros(sum(len(t.token_ids) for t in trajectories), np.int32), 0
    for trajectory in trajectories:
        stop = start + len(trajectory.token_ids)
        # Each version applies until the next one starts.
        for first, version in trajectory.versions:
            flat[start + first : stop] = version
        flat[start:stop][~trajectory.loss_mask] = 0
        start = stop
    return torch.from_numpy(flat)


def turn_rewards(trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the reward of each turn at its last token, and zero elsewhere, of concatenated trajectories: [N] float32."""
    flat, start = np.zeros(sum(len(t.token_ids) for t in trajectories), np.float32), 0
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.reward:
                flat[start + turn.stop - 1] = turn.reward
        start += len(trajectory.token_ids)
    return torch.from_numpy(flat)
