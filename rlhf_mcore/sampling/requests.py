"""From prompts to requests."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_mcore.sampling.seeds import request_seed
from rlhf_mcore.types import EpisodeRequest, Prompt, Request, Sampling

# Number, prompt, sample, sampling, step -> what an engine is asked for.
MakeRequest = Callable[[int, Prompt, int, Sampling, int], Request]


def request_of(number: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> Request:
    """Make request ``number``: for response ``sample`` to a prompt of ``step``."""
    # A prompt's further occurrences are seeded as further samples: the second has those from ``sampling.n`` on.
    seed = request_seed(sampling.seed, step, prompt.index, prompt.occurrence * sampling.n + sample)
    name = f"prompt {prompt.prompt_id!r}, sample {sample}"
    return Request(number, name, prompt.prompt_ids, sampling.of_sample(sample), seed, images=prompt.images)


def episode_request(number: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> EpisodeRequest:
    """Make request ``number``: for an episode in place of response ``sample``."""
    first = request_of(number, prompt, sample, sampling, step)
    return EpisodeRequest(
        number, first.name, prompt.prompt_ids, sampling, first.seed, prompt, sample, step, images=prompt.images
    )
