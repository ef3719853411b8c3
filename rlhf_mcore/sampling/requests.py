"""Build requests from prompts."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_mcore.sampling.seeds import request_seed
from rlhf_mcore.types import EpisodeRequest, Prompt, Request, Sampling

# (request number, prompt, sample, sampling, step) -> request to an engine.
MakeRequest = Callable[[int, Prompt, int, Sampling, int], Request]


def request_of(number: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> Request:
    """Build request ``number`` for response ``sample`` to a prompt of ``step``."""
    # Repeated occurrences of a prompt use the seeds of further samples. The second occurrence starts at sample ``sampling.n``.
    seed = request_seed(sampling.seed, step, prompt.index, prompt.occurrence * sampling.n + sample)
    name = f"prompt {prompt.prompt_id!r}, sample {sample}"
    return Request(number, name, prompt.prompt_ids, sampling.of_sample(sample), seed, images=prompt.images)


def episode_request(number: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> EpisodeRequest:
    """Build request ``number`` for an episode instead of response ``sample``."""
    first = request_of(number, prompt, sample, sampling, step)
    return EpisodeRequest(
        number, first.name, prompt.prompt_ids, sampling, first.seed, prompt, sample, step, images=prompt.images
    )
