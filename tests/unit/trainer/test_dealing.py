"""Shares of engines, computed by hand. Responses do not depend on the engine or the time."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence

import numpy as np
import pytest

from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.trainer.batches import BatchSampler
from rlhf_mcore.trainer.dealing import IN_ORDER, LONGEST_FIRST, SHARED_QUEUE, Dealer, ExpectedLengths
from rlhf_mcore.types import Completion, Prompt, Request, Sampling
from tests.episodes import sample_rollouts


def prompt(index: int, source: str = "a", length: int = 1) -> Prompt:
    return Prompt(f"row-{index}", index, [7] * length, "", source)


class Counter:
    """Claims of a world in one process."""

    def __init__(self) -> None:
        self.next = 0

    def begin(self) -> None: ...

    def claim(self, count: int) -> int:
        self.next += count
        return self.next - count


class Clocked:
    """A StepwiseEngine that takes a second for a token. Its samples depend only on a request's seed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends: list[tuple[float, int, Request]] = []
        self.begun: list[int] = []

    @property
    def num_in_flight(self) -> int:
        return len(self.ends)

    def submit(self, requests: Sequence[Request]) -> None:
        self.begun += [len(request.prompt_ids) for request in requests]
        for request in requests:
            heapq.heappush(self.ends, (self.now + len(request.prompt_ids), request.request_id, request))

    def step(self) -> list[Completion]:
        self.now, _, request = heapq.heappop(self.ends)
        ids = np.full(len(request.prompt_ids), request.seed % 1000, np.int32)
        return [Completion(request.request_id, ids, np.zeros(len(ids), np.float32), ((0, 1),), "stop")]

    def compare_ranks(self) -> None: ...


def test_a_length_is_that_of_the_row_else_of_its_source_else_of_the_longest_source_else_of_the_prompt() -> None:
    known = ExpectedLengths()
    assert known.of(prompt(0, length=5)) == 5
    known.note([prompt(1), prompt(2), prompt(3, "b")], [0, 0, 1, 1, 2, 2], [4, 10, 3, 2, 40, 50])
    assert [known.of(prompt(1)), known.of(prompt(2)), known.of(prompt(3, "b"))] == [10, 3, 50]
    assert known.of(prompt(9)) == (10 + 3) / 2
    assert known.of(prompt(9, "unknown")) == 50
    known.note([prompt(1)], [0, 0], [1, 2])
    again = ExpectedLengths()
    again.load_state_dict(json.loads(json.dumps(known.state_dict())))
    assert [again.of(prompt(1)), again.of(prompt(9))] == [2, (10 + 3 + 2) / 3]


def test_engines_expect_equally_much_and_begin_with_what_takes_longest() -> None:
    prompts = [prompt(place, length=length) for place, length in enumerate([2, 9, 3, 8, 1, 7])]
    shares = [Dealer(LONGEST_FIRST).share(prompts, 2, EngineRank(index, 2)).take(0) for index in range(2)]
    # 9 | 8; 8 + 7 = 15 | 9 + 3 = 12; 12 + 2 = 14; 14 + 1 = 15
    assert shares == [[1, 2, 0, 4], [3, 5]]
    assert [Dealer().share(prompts, 2, EngineRank(index, 2)).take(0) for index in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_an_engine_takes_what_waits_when_it_has_room_for_a_whole_group() -> None:
    prompts, claims = [prompt(place) for place in range(5)], Counter()
    first, second = (Dealer(SHARED_QUEUE, 4, claims=claims).share(prompts, 2, EngineRank(i, 2)) for i in range(2))
    assert (first.take(0), second.take(0)) == ([0, 1], [2, 3])
    assert first.take(3) == []  # only one of a prompt's two samples would fit
    assert (second.take(2), first.take(0), second.take(0)) == ([4], [], [])
    assert first.is_empty and second.is_empty


def test_a_prompt_with_more_samples_than_an_engine_draws_at_a_time_is_begun_alone() -> None:
    share = Dealer(SHARED_QUEUE, 2, claims=Counter()).share([prompt(0), prompt(1)], 8, EngineRank())
    assert (share.take(0), share.take(1), share.take(0)) == ([0], [], [1])


@pytest.mark.parametrize("order", [IN_ORDER, LONGEST_FIRST, SHARED_QUEUE])
def test_the_responses_to_a_step_are_the_same_in_every_order(order: str) -> None:
    prompts = [prompt(place % 5, length=1 + 3 * place % 7) for place in range(9)]  # rows come twice

    def draw(dealer: Dealer, num_engines: int) -> dict[tuple[int, int], list[int]]:
        found = {}
        for index in range(num_engines):
            by = BatchSampler(Clocked(), EngineRank(index, num_engines), lambda rows: [""] * len(rows), dealer=dealer)
            rollouts = sample_rollouts(by, prompts, Sampling(n=2, seed=3), step=4)
            assert [each.place for each in rollouts] == sorted(each.place for each in rollouts)
            for each in rollouts:
                assert each.trajectory.prompt.prompt_id == prompts[each.place].prompt_id
                found[each.place, each.trajectory.sample] = each.trajectory.token_ids.tolist()
        return found

    wanted = draw(Dealer(), 1)
    assert len(wanted) == 18
    assert draw(Dealer(order, 4, claims=Counter()), 2) == wanted


def test_what_takes_longest_is_begun_first_and_what_waits_when_others_have_ended() -> None:
    engine = Clocked()
    prompts = [prompt(place, length=length) for place, length in enumerate([1, 5, 2, 6])]
    dealer = Dealer(SHARED_QUEUE, 2, claims=Counter())
    by = BatchSampler(engine, EngineRank(), lambda rows: [""] * len(rows), dealer=dealer)
    sample_rollouts(by, prompts, Sampling(), step=1)
    assert engine.begun == [6, 5, 2, 1]
    assert engine.now == 7  # 6, then 1; 5, then 2
