"""Sample trajectories from an engine, without the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.platform.base import preserved_rng
from rlhf_mcore.rollout.engine import Engine
from rlhf_mcore.trainer.batches import BatchSampler
from rlhf_mcore.types import Completion, Prompt, Request, Sampling, Trajectory


def sampler_of(engine: Engine, tokenizer_dir: str | None = None) -> BatchSampler:
    """Return a sampler without a tokenizer, so that responses have no text."""
    if tokenizer_dir is None:
        return BatchSampler(engine, engine.rank, lambda rows: [""] * len(rows), ranks=engine.ranks)
    decode = partial(load_tokenizer(tokenizer_dir).batch_decode, skip_special_tokens=True)
    return BatchSampler(engine, engine.rank, decode, ranks=engine.ranks)


def generate(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
    """Return the trajectories of the prompts, without text."""
    return sampler_of(engine).sample(prompts, sampling, step=step)


def requests_to(prompts: Sequence[Prompt], sampling: Sampling, first_id: int = 0) -> list[Request]:
    """Build one request per prompt, with ids from ``first_id`` and seeds that depend only on the prompt."""
    return [
        Request(first_id + place, prompt.prompt_id, prompt.prompt_ids, sampling, seed=1000 + prompt.index)
        for place, prompt in enumerate(prompts)
    ]


def drawn_until_empty(engine: Engine) -> dict[int, Completion]:
    """Wait for all requests in flight, and return their completions."""
    completions: list[Completion] = []
    with preserved_rng():
        while engine.num_in_flight:
            completions += engine.step()
    engine.compare_ranks()
    return {completion.request_id: completion for completion in completions}


@torch.no_grad()
def logprobs_across_a_sync(
    before: Any, after: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], first_after: int, *, recompute: bool
) -> list[float]:
    """Return transformers' logprobs of a response, whose tokens from ``first_after`` on were sampled with the weights ``after``.

    The weights ``before`` compute the keys and values of the prompt and of all earlier tokens except the last one. With
    ``recompute``, ``after`` computes them again.
    """
    tokens = torch.tensor([[*prompt_ids, *token_ids]])
    old = len(prompt_ids) + first_after - 1  # positions computed before the weights changed
    head = before(tokens[:, :old], use_cache=True)
    tail = after(tokens).logits[:, old:] if recompute else None
    if tail is None:
        tail = after(tokens[:, old:], past_key_values=head.past_key_values, use_cache=True).logits
    logits = torch.cat([head.logits, tail], dim=1)[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1)[range(len(token_ids)), list(token_ids)].tolist()
