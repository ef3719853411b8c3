"""Seeds of responses. They depend on the run's seed, the step, the prompt, the sample and the turn, but not on the engine."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rlhf_mcore.types import Job, Prompt, Sampling

_SEED_BITS = 63  # torch.Generator and vLLM both take any non-negative int64


def request_seed(seed: int, step: int, prompt_index: int, sample: int) -> int:
    """Derive the seed of response ``sample`` to the prompt in row ``prompt_index`` at ``step``.

    The seed is the first 63 bits of BLAKE2b over the four numbers (little-endian int64, in the order of the arguments).
    It is equal on every machine and Python version. Seeds of neighbouring prompts, samples or steps are unrelated.
    ``sample`` counts over all occurrences of the row in the step. The seed does not depend on the engine or on other requests
    in the batch.

    Raises:
        struct.error: an argument does not fit in a signed 64-bit integer.
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, prompt_index, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def turn_seed(seed: int, turn: int) -> int:
    """Derive the seed of a later turn of an episode from the first turn's ``seed``. Seeds of different turns are unrelated."""
    digest = hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8, person=b"turn").digest()
    return int.from_bytes(digest, "little") >> 1


def task_seed(job: Job) -> int:
    """Derive the seed of the environment of a job.

    All responses of a group get the same task, because their scores are compared. If a prompt occurs again in the step, its next
    group gets another seed.
    """
    return request_seed(job.sampling.seed, job.step, job.prompt.index, -1 - job.prompt.occurrence)


def sampling_of_batch(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling parameters of batch ``number`` of a step. The first batch keeps the seed; later batches get other seeds.

    If the data set is smaller than the batches of a step, a prompt occurs again. It must not get the same responses.
    """
    return replace(sampling, seed=sampling.seed + (number << 32))


def number_occurrences(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts with ``occurrence`` set to the number of earlier prompts with the same row."""
    seen: Counter[int] = Counter()
    numbered = []
    for prompt in prompts:
        numbered.append(replace(prompt, occurrence=seen[prompt.index]) if seen[prompt.index] else prompt)
        seen[prompt.index] += 1
    return numbered
