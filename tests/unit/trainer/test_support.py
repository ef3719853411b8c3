"""The support of each sampled token, from an engine to the trainers and through a checkpoint."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_mcore.data.episodes import decode_trajectories, encode_trajectories, episode, flat_support
from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.parallel.rows import split_tokens
from rlhf_mcore.sampling.engine_loop import check_completion
from rlhf_mcore.trainer.ahead import SamplingAhead, SamplingSchedule
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.types import Completion, Prompt, Ragged, Request, Sampling, Score, Trajectory
from tests.episodes import sampled_batch
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.trainer.records import prompt
from tests.unit.trainer.test_ahead import PROMPTS as AHEAD_PROMPTS
from tests.unit.trainer.test_ahead import Engines, scores_of, step_with

PROMPTS = [prompt(index, length=1 + index) for index in range(4)]


def build_ragged(*parts: list[int]) -> Ragged[Any]:
    return Ragged(np.array([len(part) for part in parts], np.int32), np.array([i for p in parts for i in p], np.int32))


def completion(tokens: list[int], support: Ragged[Any] | None, number: int = 0) -> Completion:
    ids, logprobs = np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32)
    return Completion(number, ids, logprobs, ((0, 0),), "stop", support=support)


def two_turns(made_of: Prompt, sample: int = 0) -> Trajectory:
    """Build a turn of 1 to 3 tokens and a turn of one token. Each support identifies its prompt and sample."""
    own = 100 * made_of.index + 10 * sample
    first = [own + k for k in range(1 + made_of.index % 3)]
    turn = completion(first, build_ragged(*([token, *range(1000, 1000 + token % 3)] for token in first)))
    observation = np.array([7, 8], np.int32)
    return episode(made_of, sample, [turn, observation, completion([own], build_ragged([own + 1, own]))], "text")


def supports(field: Ragged[Any]) -> list[list[int]]:
    tensors = Ragged(torch.as_tensor(field.counts), torch.as_tensor(field.values))
    return [part.values.tolist() for part in split_tokens(tensors, [1] * len(field.counts))]


def test_an_episode_has_the_support_of_the_policys_tokens_alone() -> None:
    made = two_turns(PROMPTS[1])  # two tokens of a prompt, two of the policy, two of the environment, one of the policy
    assert made.support is not None
    assert supports(made.support) == [[], [], [100, 1000], [101, 1000, 1001], [], [], [101, 100]]
    assert [bool(each) for each in supports(made.support)] == made.loss_mask.tolist()
    without = episode(PROMPTS[1], 0, [completion([5], None)], "text")
    assert without.support is None
    assert supports(flat_support([without, made]))[2:5] == [[], [], []]


@pytest.mark.usefixtures("rank_threads")
def test_rows_arrive_with_their_supports() -> None:
    """The last rank has a row without a support, as after a resume with top_p."""
    trajectories = [two_turns(each) for each in PROMPTS]
    trajectories[3] = replace(trajectories[3], support=None)

    def body(group: ThreadGroup) -> Any:
        rank = group.rank()
        batch, _ = RowExchange(1)(sampled_batch(PROMPTS, [rank], [trajectories[rank]], [Score(0.0)]))
        assert batch.support is not None
        parts = split_tokens(batch.support, batch.lengths[batch.rows].tolist())
        return dict(zip(batch.rows.tolist(), map(supports, parts), strict=True))

    found = run_ranks(4, body)
    rows = {row: values for each in found for row, values in each.items()}
    for row, trajectory in enumerate(trajectories):
        own = trajectory.support
        assert rows[row] == (supports(own) if own is not None else [[]] * len(trajectory.token_ids))


def test_a_checkpoint_holds_them() -> None:
    groups = {3: [two_turns(PROMPTS[1], 0), two_turns(PROMPTS[1], 1)], 0: [two_turns(PROMPTS[2])]}
    prompts = {3: PROMPTS[1], 0: PROMPTS[2]}
    found = decode_trajectories(encode_trajectories(groups), prompts)
    for number, group in groups.items():
        for before, after in zip(group, found[number], strict=True):
            assert before.support is not None and after.support is not None
            assert supports(after.support) == supports(before.support)
    plain = {3: [replace(two_turns(PROMPTS[1]), support=None)]}
    content = encode_trajectories(plain)
    assert b"support" not in content, "a run without top_p writes what it wrote before"
    assert decode_trajectories(content, prompts)[3][0].support is None


@pytest.mark.parametrize(
    "needed", [{"records_support": True, "top_p": 0.9}, {"records_routes": True}, {"records_drafts": True}]
)
def test_what_an_older_run_sampled_without_is_drawn_again(needed: dict[str, Any]) -> None:
    """A checkpoint of before supports were recorded, with top_p, or routes: its responses cannot be learned from exactly."""

    def ahead_of(engines: Engines, sampling: Sampling) -> tuple[SamplingAhead, PromptSampler]:
        sampler = PromptSampler(len(AHEAD_PROMPTS), 3, seed=5, shuffle=True)
        return SamplingAhead(
            AHEAD_PROMPTS, sampler, engines.begin, sampling, SamplingSchedule(3, 2), scores_of
        ), sampler

    plain, engines = Sampling(n=2, seed=9), Engines(random.Random(1), at_once=99)
    ahead, sampler = ahead_of(engines, plain)
    for step in (1, 2):
        step_with(ahead, engines, step)
    engines.finish()
    state, finished, cursor = ahead.state_dict(), ahead.finished_trajectories(), sampler.state_dict()
    assert finished
    asked = []
    for sampling in (plain, replace(plain, **needed)):
        resumed, sampler = ahead_of(Engines(random.Random(2)), sampling)
        sampler.load_state_dict(cursor)
        resumed.load_state_dict(state)
        resumed.load_finished(finished)
        resumed.fill(3)
        asked.append(resumed.num_in_flight)
    assert asked[1] - asked[0] == 2 * len(finished)


RECORDING = Request(3, "prompt 'sum-17', sample 3", [5, 6], Sampling(top_p=0.9, top_k=512, records_support=True), 0)


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (None, "none for 2 tokens"),
        (build_ragged([1]), "those of 1 tokens for 2 tokens"),
        (build_ragged([1, 4], [1, 4]), "support without the sampled token, at token 1 of"),
        (build_ragged([1, 4], []), "support without the sampled token, at token 1 of"),
        (build_ragged([1, 1], [2]), "support without the sampled token, at token 0 of"),
    ],
)
def test_a_token_without_its_support_is_refused_by_name(support: Ragged[Any] | None, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        check_completion(RECORDING, completion([1, 2], support, 3))
    assert "'sum-17', sample 3" in str(raised.value)
    check_completion(RECORDING, completion([1, 2], build_ragged([1, 4], [4, 2]), 3))
    check_completion(replace(RECORDING, sampling=Sampling(top_p=0.9)), completion([1, 2], None, 3))  # an evaluation's
