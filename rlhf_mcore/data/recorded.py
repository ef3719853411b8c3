"""Join what an engine has recorded of an episode's tokens beside their logprobs. It is loaded where an engine records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.types import Completion, Ragged, Recorded


def join_support(
    prompt_tokens: int, written: Sequence[Completion | NDArray[np.int32]]
) -> Ragged[NDArray[np.int32]] | None:
    """Join the support of the policy's tokens, empty for other tokens. Returns None if a completion has none recorded."""
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
    """Join the fields that an engine recorded of the policy's tokens of an episode, blank for other tokens.

    What a later completion has recorded of tokens before it fills what is blank.
    """
    completions = [part for part in written if isinstance(part, Completion)]
    names = completions[0].fields.keys() if completions else ()
    lengths = (len(part.token_ids if isinstance(part, Completion) else part) for part in written)
    stops = [*accumulate(lengths, initial=prompt_tokens)]
    drawn = [(part, stop) for part, stop in zip(written, stops[1:], strict=True) if isinstance(part, Completion)]
    for completion, stop in drawn:
        if completion.fields.keys() != names:
            raise ValueError(f"{where}: the engine recorded {sorted(names)} and then {sorted(completion.fields)}")
        for name, values in completion.fields.items():
            num_tokens = len(completion.token_ids)
            if _num_tokens(values) not in (num_tokens, num_tokens if isinstance(values, Ragged) else stop):
                raise ValueError(
                    f"{where}: the engine gave {name} of {_num_tokens(values)} tokens for {num_tokens} response tokens"
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
    """Fill the blank tokens of ``whole`` with parts, each of the tokens up to a stop, the first ones first."""
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
    """Return zeros for ``num_tokens`` tokens, or no values, in the form of ``like``."""
    if isinstance(like, Ragged):
        return Ragged(np.zeros(num_tokens, np.int32), like.values[:0])
    return np.zeros((num_tokens, *like.shape[1:]), like.dtype)


def join_recorded(parts: Sequence[Recorded]) -> Recorded:
    """Concatenate the parts of a field of tokens."""
    if isinstance(parts[0], Ragged):
        ragged = [part for part in parts if isinstance(part, Ragged)]
        return Ragged(
            np.concatenate([part.counts for part in ragged]), np.concatenate([part.values for part in ragged])
        )
    return np.concatenate([part for part in parts if not isinstance(part, Ragged)])
