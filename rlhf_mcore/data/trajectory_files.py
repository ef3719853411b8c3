"""Trajectories as safetensors files in a checkpoint, which stores the samples for coming steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from rlhf_mcore.data.episodes import flat_fields, flat_support, recorded_fields
from rlhf_mcore.types import Prompt, Ragged, Score, Trajectory, Turn

# Tensor names in a trajectory file: the two parts of a support, and prefixes for recorded fields.
_SUPPORT = ("support_counts", "support_ids")
_FIELD, _COUNTS, _VALUES = "field.", "counts.", "values."


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
        supports = _cut(Ragged(*(flat.pop(name) for name in _SUPPORT)), lengths) if _SUPPORT[0] in flat else []
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
            recorded[own] = _cut(Ragged(flat.pop(name), flat.pop(_VALUES + own)), lengths)
    return recorded


def _cut(values: Ragged[NDArray[Any]], lengths: Sequence[int]) -> list[Ragged[NDArray[Any]]]:
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
