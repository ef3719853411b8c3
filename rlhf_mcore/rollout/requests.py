"""From prompts to requests and from completions to trajectories: what every engine shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.tokenizer_files import end_tokens
from rlhf_mcore.data.episodes import single_turn
from rlhf_mcore.foreign import Fields, read_json
from rlhf_mcore.rollout.seeds import request_seed
from rlhf_mcore.types import Prompt, Sampling, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Request:
    """One response to be drawn."""

    prompt: Prompt
    sample: int
    seed: int
    max_new_tokens: int  # already cut to what the context has room for


@dataclass(slots=True)
class Completion:
    """What an engine drew for a request. ``finish_reason`` is "stop" or "length"."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


def expand_requests(prompts: Sequence[Prompt], sampling: Sampling, step: int, max_model_len: int) -> list[Request]:
    """``sampling.n`` requests per prompt, in prompt order, samples adjacent.

    A prompt's further occurrences in a step are seeded as further samples: the second has those from ``sampling.n`` on.

    Raises:
        ValueError: a prompt is empty, or leaves no room for a token in ``max_model_len``.
    """
    requests = []
    for prompt in prompts:
        room = _room(prompt, max_model_len)
        for sample in range(sampling.n):
            seed = request_seed(sampling.seed, step, prompt.index, prompt.occurrence * sampling.n + sample)
            requests.append(Request(prompt, sample, seed, min(sampling.max_new_tokens, room)))
    return requests


def _room(prompt: Prompt, max_model_len: int) -> int:
    if not prompt.prompt_ids:
        raise ValueError(f"prompt {prompt.prompt_id!r} is empty: an engine needs at least one token")
    room = max_model_len - len(prompt.prompt_ids)
    if room < 1:
        raise ValueError(
            f"prompt {prompt.prompt_id!r} has {len(prompt.prompt_ids)} tokens, which leaves no room for a response in "
            f"rollout.max_model_len={max_model_len}; raise it or drop prompts by data.max_prompt_tokens"
        )
    return room


def check_completion(request: Request, completion: Completion) -> None:
    """Refuse what training must not see.

    Raises:
        RuntimeError: no token, a count of logprobs that differs from the count of tokens, a logprob that is NaN,
            infinite or positive, or a request that did not finish. The message names the prompt.
    """
    where = f"prompt {request.prompt.prompt_id!r}, sample {request.sample}"
    tokens, logprobs = completion.token_ids, completion.logprobs
    if not tokens:
        raise RuntimeError(f"the engine returned no token for {where}")
    if len(logprobs) != len(tokens):
        raise RuntimeError(f"the engine returned {len(logprobs)} logprobs for {len(tokens)} tokens ({where})")
    for position, value in enumerate(logprobs):
        if not math.isfinite(value) or value > 1e-5:
            raise RuntimeError(f"the engine returned logprob {value} at token {position} of {where}")
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine gave up with finish_reason={completion.finish_reason!r} for {where}")


def to_trajectories(
    requests: Sequence[Request],
    completions: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    policy_version: int,
) -> list[Trajectory]:
    """Checked completions as trajectories, in the order of ``requests``; text without special tokens."""
    if len(completions) != len(requests):
        raise RuntimeError(f"the engine returned {len(completions)} completions for {len(requests)} requests")
    for request, completion in zip(requests, completions, strict=True):
        check_completion(request, completion)
    texts = tokenizer.batch_decode([completion.token_ids for completion in completions], skip_special_tokens=True)
    return [
        single_turn(
            request.prompt,
            request.sample,
            completion.token_ids,
            completion.logprobs,
            text,
            completion.finish_reason,
            policy_version,
        )
        for request, completion, text in zip(requests, completions, texts, strict=True)
    ]


def stop_token_ids(model_dir: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a response, sorted: the tokenizer's and those of generation_config.json."""
    stops = {int(tokenizer.eos_token_id)}
    path = Path(model_dir) / "generation_config.json"
    declared = end_tokens(_read(path)) if path.is_file() else []
    return sorted(stops.union(declared))


def refuse_foreign_code(model_dir: str) -> None:
    """Refuse a model directory that wants Python code of its own to be run.

    Raises:
        ConfigError: there is no config.json, or it has an ``auto_map``.
    """
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={model_dir!r}: no config.json there; give a Hugging Face model directory")
    if "auto_map" in _read(path):
        raise ConfigError(
            f"model.path={model_dir!r}: config.json asks to run code of its own (auto_map), which is refused; "
            "use an architecture that transformers knows"
        )


def _read(path: Path) -> Fields:
    return read_json(path, where=f"model.path={str(path.parent)!r}: {path.name}")
