"""Sharing a step's prompts out to engines: each response has a seed of its own, whoever draws it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlhf_mcore.data.episodes import single_turn
from rlhf_mcore.data.sampler import WeightedSampler
from rlhf_mcore.rollout.requests import expand_requests
from rlhf_mcore.rollout.seeds import request_seed
from rlhf_mcore.trainer.rollouts import generate
from rlhf_mcore.types import Prompt, Sampling, Trajectory

SIZES, BATCH, SAMPLES = [40, 8], 64, 8  # half of a step is from the second file, each of its rows four times


class Seeds:
    """An engine that draws nothing: each response is its seed."""

    is_lead = True

    def __init__(self, index: int, count: int) -> None:
        self.engine_index, self.num_engines = index, count

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        requests = expand_requests(prompts, sampling, step, max_model_len=64)
        return [single_turn(r.prompt, r.sample, [0], [0.0], str(r.seed), "stop", 0) for r in requests]


def draw(prompts: Sequence[Prompt], num_engines: int, step: int = 3) -> dict[tuple[int, int], int]:
    """(place, sample) -> seed."""
    found = {}
    for index in range(num_engines):
        made = generate(Seeds(index, num_engines), prompts, Sampling(n=SAMPLES, seed=5), step=step)  # type: ignore[arg-type]
        for place, trajectory in zip(made.positions, made.trajectories, strict=True):
            assert trajectory.prompt.prompt_id == prompts[place].prompt_id
            found[place, trajectory.sample] = int(trajectory.response_text)
    return found


def step_of(sampler: WeightedSampler) -> list[Prompt]:
    rows = [Prompt(f"row-{i}", i, [1], "") for i in range(sum(SIZES))]
    return [rows[place] for place in sampler.next_batch()]


def weighted() -> WeightedSampler:
    return WeightedSampler(SIZES, [1.0, 1.0], BATCH, seed=1, shuffle=True)


@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_a_prompt_that_a_step_holds_several_times_gets_other_seeds_each_time(num_engines: int) -> None:
    prompts = step_of(weighted())
    assert len({prompt.index for prompt in prompts}) < BATCH
    seeds = draw(prompts, num_engines)
    assert len(seeds) == len(set(seeds.values())) == BATCH * SAMPLES
    assert seeds == draw(prompts, 1)
    # The first time a row comes its seeds are those that it has alone.
    assert seeds[0, 2] == request_seed(5, 3, prompts[0].index, 2)


def test_a_resumed_run_draws_with_the_same_seeds() -> None:
    whole, part = weighted(), weighted()
    steps = [step_of(whole) for _ in range(3)]
    step_of(part)
    resumed = weighted()
    resumed.load_state_dict(part.state_dict())
    assert [draw(step_of(resumed), 2, step) for step in (2, 3)] == [draw(steps[1], 2, 2), draw(steps[2], 2, 3)]
