"""Sampled episodes as records, and their tokens as the flat tensors that travel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.types import Completion, Prompt, Ragged, Score, Trajectory, Turn

_SUPPORT = ("support_counts", "support_ids")  # in a file of trajectories, where there is a support


def episode(
    prompt: Prompt,
    sample: int,
    written: Sequence[Completion | NDArray[np.int32]],
    response_text: str,
    rewards: Sequence[float] = (),
) -> Trajectory:
    """A prompt and what was written after it, in order: completions by the policy, tokens [n] by the environment.

    ``rewards``: of each completion, where turns have their own.

    Raises:
        ValueError: the prompt has no tokens, so that nothing predicts the first token of the policy; or the number of logprobs of a
            completion is not that of its tokens.
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
        support=_support(len(prompt.prompt_ids), written),
    )


def _support(prompt_tokens: int, written: Sequence[Completion | NDArray[np.int32]]) -> Ragged[NDArray[np.int32]] | None:
    """Of an episode: that of the policy's tokens, and none of the prompt's and the environment's. None where no engine recorded it."""
    counts, values = [np.zeros(prompt_tokens, np.int32)], [np.zeros(0, np.int32)]
    for part in written:
        if not isinstance(part, Completion):
            counts.append(np.zeros(len(part), np.int32))
        elif part.support is None:
            return None
        else:
            counts.append(part.support.counts)
            values.append(part.support.values)
    return Ragged(np.concatenate(counts), np.concatenate(values))


def flat_fields(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """``token_ids`` int32, ``loss_mask`` bool and ``rollout_logprobs`` float32 of trajectories, back to back: [N] each."""
    token_ids = np.concatenate([np.zeros(0, np.int32), *(t.token_ids for t in trajectories)])
    loss_mask = np.concatenate([np.zeros(0, np.bool_), *(t.loss_mask for t in trajectories)])
    logprobs = np.concatenate([np.zeros(0, np.float32), *(t.logprobs for t in trajectories)])
    tensors = {"token_ids": token_ids, "loss_mask": loss_mask, "rollout_logprobs": logprobs}
    return {name: torch.from_numpy(values) for name, values in tensors.items()}


def flat_support(trajectories: Sequence[Trajectory]) -> Ragged[Tensor]:
    """The support of trajectories back to back; tokens of a trajectory without one have no ids."""
    none = np.zeros(0, np.int32)
    counts = [np.zeros(len(t.token_ids), np.int32) if t.support is None else t.support.counts for t in trajectories]
    values = [none if t.support is None else t.support.values for t in trajectories]
    return Ragged(*(torch.from_numpy(np.concatenate([none, *parts])) for parts in (counts, values)))


def token_versions(trajectories: Sequence[Trajectory]) -> Tensor:
    """Version of the policy that sampled each token, and zero at other tokens, of trajectories back to back: [N] int32."""
    flat, start = np.zeros(sum(len(t.token_ids) for t in trajectories), np.int32), 0
    for trajectory in trajectories:
        stop = start + len(trajectory.token_ids)
        for first, version in trajectory.versions:  # each holds until the next one begins
            flat[start + first : stop] = version
        flat[start:stop][~trajectory.loss_mask] = 0
        start = stop
    return torch.from_numpy(flat)


def encode_trajectories(trajectories: Mapping[int, Sequence[Trajectory]]) -> bytes:
    """Trajectories under the numbers of their groups as a safetensors file: tokens back to back, all else as JSON in its header."""
    rows = [(number, trajectory) for number, group in trajectories.items() for trajectory in group]
    records = [
        {
            "group": number,
            "sample": t.sample,
            "length": len(t.token_ids),
            "turns": [astuple(turn) for turn in t.turns],
            "versions": t.versions,
            "text": t.response_text,
            "finish_reason": t.finish_reason,
            "score": t.score and asdict(t.score),
            **(
                {"prompt": t.prompt.text} if t.score else {}
            ),  # which ends with the first observation of its environment
        }
        for number, t in rows
    ]
    flat = {name: field.numpy() for name, field in flat_fields([t for _, t in rows]).items()}
    if any(t.support is not None for _, t in rows):
        support = flat_support([t for _, t in rows])
        flat |= dict(zip(_SUPPORT, (support.counts.numpy(), support.values.numpy()), strict=True))
    return safetensors.numpy.save(flat, metadata={"records": json.dumps(records)})


def decode_trajectories(content: bytes, prompts: Mapping[int, Prompt]) -> dict[int, list[Trajectory]]:
    """What ``encode_trajectories`` has written. ``prompts``: of the groups.

    Raises:
        ValueError: there is something else in ``content``, or a group has no prompt.
    """
    try:
        flat = safetensors.numpy.load(content)
        support = Ragged(*(flat.pop(name) for name in _SUPPORT)) if _SUPPORT[0] in flat else None
        ends = [] if support is None else [0, *support.counts.cumsum(dtype=np.int64).tolist()]
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        records = json.loads(header["__metadata__"]["records"])
        found: dict[int, list[Trajectory]] = {}
        start = 0
        for record in records:
            own = slice(start, start := start + record["length"])
            prompt = prompts[record["group"]]
            if "prompt" in record:
                prompt_ids = flat["token_ids"][own][: record["turns"][0][2]].tolist()
                prompt = replace(prompt, prompt_ids=prompt_ids, text=record["prompt"])
            trajectory = Trajectory(
                prompt,
                record["sample"],
                token_ids=flat["token_ids"][own],
                loss_mask=flat["loss_mask"][own],
                logprobs=flat["rollout_logprobs"][own],
                turns=tuple(Turn(*turn) for turn in record["turns"]),
                versions=tuple((first, version) for first, version in record["versions"]),
                response_text=record["text"],
                finish_reason=record["finish_reason"],
                score=Score(**score) if (score := record.get("score")) else None,
                support=support and Ragged(support.counts[own], support.values[ends[own.start] : ends[own.stop]]),
            )
            found.setdefault(record["group"], []).append(trajectory)
    except (safetensors.SafetensorError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it holds no trajectories ({type(error).__name__}: {error})") from error
    if support is not None and (len(ends) != start + 1 or ends[-1] != len(support.values)):
        raise ValueError(f"it names {ends[-1]} tokens that were drawn from and holds another number of them")
    if any(start != len(field) for field in flat.values()):
        raise ValueError(f"it names {start} tokens and holds another number of them")
    return found


def turn_rewards(trajectories: Sequence[Trajectory]) -> Tensor:
    """Rewards of turns at the last token of each, and zeros, of trajectories back to back: [N] float32."""
    flat, start = np.zeros(sum(len(t.token_ids) for t in trajectories), np.float32), 0
    for trajectory in trajectories:
        for turn in trajectory.turns:
            if turn.reward:
                flat[start + turn.stop - 1] = turn.reward
        start += len(trajectory.token_ids)
    return torch.from_numpy(flat)
