"""Build requests from jobs."""

from __future__ import annotations

from rlhf_mcore.sampling.seeds import request_seed
from rlhf_mcore.types import Job, Prompt, Request, Sampling


def request_of(job: Job) -> Request:
    """Build the request for the first turn of a job."""
    prompt, sampling = job.prompt, job.sampling
    # Repeated occurrences of a prompt use the seeds of further samples. The second occurrence starts at sample ``sampling.n``.
    seed = request_seed(sampling.seed, job.step, prompt.index, prompt.occurrence * sampling.n + job.sample)
    return Request(job.number, job.name, prompt.prompt_ids, sampling.of_sample(job.sample), seed, images=prompt.images)


def jobs_of(place: int, prompt: Prompt, sampling: Sampling, step: int) -> list[Job]:
    """Return the jobs of the prompt at index ``place``. Job numbers increase with the index, then with the sample."""
    count = sampling.num_drawn
    return [Job(place * count + sample, prompt, sample, sampling, step) for sample in range(count)]
