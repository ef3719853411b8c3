"""Build trajectories with one response, and examples, from plain lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from rlhf_mcore.data import episodes
from rlhf_mcore.data.examples import TokenizedExample
from rlhf_mcore.trainer.batches import BatchSampler, Rollout, SampledBatch, scored_rollouts
from rlhf_mcore.types import Completion, Prompt, Sampling, Score, Trajectory

T = TypeVar("T")


def single_turn(
    prompt: Prompt,
    sample: int,
    response_ids: Sequence[int],
    logprobs: Sequence[float],
    response_text: str,
    finish_reason: str,
    policy_version: int,
) -> Trajectory:
    """Return the trajectory that an engine would sample with one policy version."""
    completion = Completion(
        0, np.array(response_ids, np.int32), np.array(logprobs, np.float32), ((0, policy_version),), finish_reason
    )
    return episodes.episode(prompt, sample, [completion], response_text)


def make_example(prompt_ids: Sequence[int], *responses: Sequence[int]) -> TokenizedExample:
    """Return a tokenized prompt and its responses."""
    return TokenizedExample("", np.array(prompt_ids, np.int32), [np.array(ids, np.int32) for ids in responses])


def resolved_future(value: T) -> Future[T]:
    """Return a completed future."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def sample_rollouts(
    sampler: BatchSampler, prompts: Sequence[Prompt], sampling: Sampling, *, step: int
) -> list[Rollout]:
    """Sample a step, and give each response a score of 0. Collective over the world."""
    groups = sampler.sample_step(
        prompts,
        sampling,
        step=step,
        begin_scores=lambda trajectories: resolved_future([Score(0.0)] * len(trajectories)),
    )
    return scored_rollouts(groups)


def sampled_batch(
    prompts: Sequence[Prompt],
    places: Sequence[int],
    trajectories: Sequence[Trajectory],
    scores: Sequence[Score],
    left_out: Sequence[Score] = (),
    greedy: Mapping[int, Score] | None = None,
) -> SampledBatch:
    """Return a sampled batch. ``greedy``: scores of greedy responses by place; no test reads these responses."""
    rollouts = [Rollout(*each) for each in zip(places, trajectories, scores, strict=True)]
    baselines = [
        Rollout(place, single_turn(prompts[place], 0, [1], [0.0], "", "stop", 0), score)
        for place, score in (greedy or {}).items()
    ]
    return SampledBatch(list(prompts), rollouts, baselines, list(left_out))
