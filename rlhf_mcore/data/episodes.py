"""Sampled episodes as records, as flat tensors for the ranks, and as safetensors files in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from itertools import accumulate
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.types import Completion, Field, Prompt, Ragged, Recorded, Score, Trajectory, Turn

# Tensor names in a trajectory file: the two parts of a support, and prefixes for recorded fields.
_SUPPORT = ("support_counts", "support_ids")
_FIELD, _COUNTS, _VALUES = "field.", "counts.", "values."


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


# ------------------------------------------------------------------------------------------------- files of a checkpoint
def encode_trajectories(trajectories: Mapping[int, Sequence[Trajectory]]) -> bytes:
    """Encode trajectories by group number as a safetensors file.

    Tokens are concatenated, and the header contains the rest as JSON.
    """
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
            # The prompt of a finished episode ends with the first observation of its environment.
            **({"prompt": t.prompt.text} if t.score else {}),
            **({"images": t.prompt.images} if t.prompt.images else {}),
            **({"sequences": t.sequences} if t.sequences else {}),
            **({"sequence_images": t.sequence_images} if t.sequence_images else {}),
            **({"record": t.record} if t.record else {}),
        }
        for number, t in rows
    ]
    flat = {name: field.numpy() for name, field in flat_fields([t for _, t in rows]).items()}
    if any(t.support is not None for _, t in rows):
        support = flat_support([t for _, t in rows])
        flat |= dict(zip(_SUPPORT, (support.counts.numpy(), support.values.numpy()), strict=True))
    for name, values in recorded_fields([t for _, t in rows]).items():
        if isinstance(values, Ragged):
            flat |= {_COUNTS + name: values.counts.numpy(), _VALUES + name: values.values.numpy()}
        else:
            flat[_FIELD + name] = values.numpy()
    return safetensors.numpy.save(flat, metadata={"records": json.dumps(records)})


def decode_trajectories(content: bytes, prompts: Mapping[int, Prompt]) -> dict[int, list[Trajectory]]:
    """Decode the result of ``encode_trajectories``. ``prompts`` contains the prompts by group number.

    Raises:
        ValueError: ``content`` has another format, or a group has no prompt.
    """
    try:
        flat = safetensors.numpy.load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        records = json.loads(header["__metadata__"]["records"])
        lengths = [record["length"] for record in records]
        supports = _split_rows(Ragged(*(flat.pop(name) for name in _SUPPORT)), lengths) if _SUPPORT[0] in flat else []
        recorded = _take_recorded(flat, lengths)
        groups: dict[int, list[Trajectory]] = {}
        start = 0
        for number, record in enumerate(records):
            own = slice(start, start := start + record["length"])
            prompt = prompts[record["group"]]
            if "prompt" in record:
                prompt_ids = flat["token_ids"][own][: record["turns"][0][2]].tolist()
                images = tuple(record.get("images", ()))
                prompt = replace(prompt, prompt_ids=prompt_ids, text=record["prompt"], images=images)
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
                support=supports[number] if supports else None,
                fields={name: parts[number] for name, parts in recorded.items()},
                sequences=tuple(record.get("sequences", ())),
                sequence_images=tuple(map(tuple, record.get("sequence_images", ()))),
                record=record.get("record"),
            )
            groups.setdefault(record["group"], []).append(trajectory)
    except (safetensors.SafetensorError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it contains no trajectories ({type(error).__name__}: {error})") from error
    if any(start != len(values) for values in flat.values()):
        raise ValueError(f"its records count {start} tokens, but it contains another number of tokens")
    return groups


def _take_recorded(flat: dict[str, NDArray[Any]], lengths: Sequence[int]) -> dict[str, list[Any]]:
    """Return the recorded fields of each row, and remove ragged counts and values from ``flat``."""
    recorded: dict[str, list[Any]] = {}
    for name in list(flat):
        if name.startswith(_FIELD):
            recorded[name.removeprefix(_FIELD)] = np.split(flat[name], np.cumsum(lengths)[:-1])
        elif name.startswith(_COUNTS):
            own = name.removeprefix(_COUNTS)
            recorded[own] = _split_rows(Ragged(flat.pop(name), flat.pop(_VALUES + own)), lengths)
    return recorded


def _split_rows(values: Ragged[NDArray[Any]], lengths: Sequence[int]) -> list[Ragged[NDArray[Any]]]:
    """Split values into rows of ``lengths`` tokens.

    Raises:
        ValueError: the numbers of tokens or values differ from the counts.
    """
    if len(values.counts) != sum(lengths) or values.counts.sum() != len(values.values):
        raise ValueError(
            f"it counts {values.counts.sum()} values for {sum(lengths)} tokens, but contains other numbers of them"
        )
    counts = np.split(values.counts, np.cumsum(lengths)[:-1])
    parts = np.split(values.values, np.cumsum([part.sum() for part in counts])[:-1])
    return [Ragged(*part) for part in zip(counts, parts, strict=True)]
