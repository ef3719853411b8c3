"""Rollouts are coroutines: the engine samples when all of them wait for it, whatever the time that they take."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.coroutines import run
from rlhf_mcore.sampling.engine_loop import EngineLoop, LostTrajectory
from rlhf_mcore.sampling.followers import EnginePass, follow, run_pass
from rlhf_mcore.sampling.rollouts import Policy, RolloutLimits, request_of
from rlhf_mcore.types import Completion, Job, Prompt, Request, Sampling
from tests.unit.parallel.world import ThreadGroup, rank_threads, run_ranks

__all__ = ["rank_threads"]
PROMPTS = [Prompt(f"p{index}", index, [10 + index] * (1 + index % 3), "") for index in range(6)]
SAMPLING = Sampling(n=2, max_new_tokens=4, seed=3)


class BatchDependent:
    """An engine whose tokens depend on all requests in flight, as rounding makes it. A response of n tokens takes n steps."""

    def __init__(self) -> None:
        self.states: dict[int, tuple[Request, list[int]]] = {}
        self.log: list[Any] = []

    @property
    def num_in_flight(self) -> int:
        return len(self.states)

    def submit(self, requests: Sequence[Request]) -> None:
        self.log.append([request.request_id for request in requests])
        self.states |= {request.request_id: (request, []) for request in requests}

    def cancel(self, request_ids: Collection[int]) -> None:
        self.log.append(("cancel", sorted(request_ids)))
        for request_id in request_ids:
            self.states.pop(request_id, None)

    def step(self) -> list[Completion]:
        finished: list[Completion] = []
        batch = sum(request.seed % 97 for request, _ in self.states.values())
        for request_id, (request, tokens) in list(self.states.items()):
            tokens.append((batch + request.seed + len(request.prompt_ids)) % 1000)
            if len(tokens) == 1 + request.seed % request.sampling.max_new_tokens:
                ids = np.array(tokens, np.int32)
                finished.append(Completion(request_id, ids, np.zeros(len(ids), np.float32), ((0, 1),), "stop"))
                del self.states[request_id]
        return finished

    def sampled_tokens(self, request_ids: Collection[int]) -> dict[int, Sequence[int]]:
        return {request_id: list(self.states[request_id][1]) for request_id in request_ids}

    def forget_prefixes(self) -> None:
        self.log.append("forget")

    def compare_ranks(self) -> None:
        self.log.append("compare")


def jobs() -> list[Job]:
    return [
        Job(2 * place + sample, prompt, sample, SAMPLING, 1)
        for place, prompt in enumerate(PROMPTS)
        for sample in (0, 1)
    ]


def of_three_turns(delay: Callable[[], float]) -> Callable[[EngineLoop, Job], Coroutine[Any, Any, list[int]]]:
    async def rollout(engine: EngineLoop, job: Job) -> list[int]:
        policy, tokens = Policy(engine, job, RolloutLimits()), list(job.prompt.prompt_ids)
        for _ in range(3):
            tokens += (await policy.sample(list(tokens))).token_ids.tolist()
            await asyncio.sleep(delay())  # an environment
        return tokens

    return rollout


def all_of(
    rollout: Callable[[EngineLoop, Job], Coroutine[Any, Any, Any]],
    engine: Any,
    ranks: Any = None,
    places: int | None = None,
) -> list[Any]:
    async def together() -> list[Any]:
        return await loop.join([loop.begin(rollout(loop, job)) for job in jobs()])

    loop = EngineLoop(engine, partial(run_pass, engine, ranks), until_finished=True, places=places)
    return run(loop.run(together()))


def test_tokens_do_not_depend_on_the_time_that_rollouts_take() -> None:
    chance = random.Random(0)
    wanted = all_of(of_three_turns(lambda: 0), BatchDependent())
    assert len({tuple(found) for found in wanted}) == 12
    for _ in range(3):
        assert all_of(of_three_turns(lambda: chance.random() / 200), BatchDependent()) == wanted


def test_rollouts_get_places_in_their_order_whatever_the_time_that_others_take() -> None:
    chance, most = random.Random(0), 0

    def in_places(delay: Callable[[], float]) -> list[Any]:
        rollout, inside, begun = of_three_turns(delay), set[int](), list[int]()

        async def wait_and_play(engine: EngineLoop, job: Job) -> list[int]:
            nonlocal most
            await asyncio.sleep(delay())  # rollouts ask for their places in any order
            async with engine.place():
                inside.add(job.number)
                begun.append(job.number)
                most = max(most, len(inside))
                tokens = await rollout(engine, job)
                await asyncio.sleep(delay())
                inside.discard(job.number)
                return tokens

        return [all_of(wait_and_play, BatchDependent(), places=5), begun]

    wanted = in_places(lambda: 0)
    assert wanted[1] == list(range(12)) and most == 5
    for _ in range(3):
        assert in_places(lambda: chance.random() / 200) == wanted
    assert all_of(of_three_turns(lambda: 0), BatchDependent()) != wanted[0]


def test_a_rollout_that_is_cancelled_gives_its_place_to_the_next() -> None:
    async def cancel() -> list[str]:
        ended: list[str] = []

        async def hold(name: str) -> None:
            async with loop.place():
                ended.append(name)
                await asyncio.sleep(60)

        loop = EngineLoop(BatchDependent(), places=1)
        serving = asyncio.create_task(loop.serve())
        tasks = {name: loop.begin(hold(name)) for name in ("waits", "got it", "holds", "last")}
        await asyncio.sleep(0)
        tasks["waits"].cancel()
        await asyncio.sleep(0)
        while loop._free_places != 0:
            await asyncio.sleep(0)
        tasks["got it"].cancel()  # it has the place, but has not continued yet
        while not ended:
            await asyncio.sleep(0)
        tasks["holds"].cancel()
        while len(ended) < 2:
            await asyncio.sleep(0)
        tasks["last"].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        loop.pause()
        await serving
        assert loop._free_places == 1 and loop._num_busy == loop._num_live == 0
        return ended

    assert run(cancel()) == ["holds", "last"]


def test_a_rollout_that_samples_twice_at_once_is_waited_for_as_a_whole() -> None:
    async def rollout(engine: EngineLoop, job: Job) -> list[int]:
        policy = Policy(engine, job, RolloutLimits())
        pair = await asyncio.gather(policy.sample([1]), policy.sample([2]))
        await asyncio.sleep(0.001 * (job.number % 3))
        return [token for completion in pair for token in completion.token_ids.tolist()]

    assert all_of(rollout, BatchDependent()) == all_of(rollout, BatchDependent())


def test_turns_have_seeds_of_their_own_and_the_first_has_that_of_the_prompt() -> None:
    asked: list[Request] = []

    class Asked(BatchDependent):
        def submit(self, requests: Sequence[Request]) -> None:
            asked.extend(requests)
            super().submit(requests)

    all_of(of_three_turns(lambda: 0), Asked())
    assert len({request.seed for request in asked}) == len({request.request_id for request in asked}) == 36
    for job in jobs():
        assert [request for request in asked if request.name == job.name] == [request_of(job)]
    assert [request.name for request in asked].count("prompt 'p1', sample 1, turn 1") == 1


@pytest.mark.usefixtures("rank_threads")
def test_ranks_of_an_engine_make_the_same_passes() -> None:
    def rank(group: ThreadGroup) -> tuple[list[Any], list[Any]]:
        engine = BatchDependent()
        if group.rank():
            follow(engine, group)  # type: ignore[arg-type]
            return engine.log, []
        return engine.log, all_of(of_three_turns(lambda: 0.001), engine, group)

    (lead, found), *others = run_ranks(3, rank)
    assert found == all_of(of_three_turns(lambda: 0), BatchDependent())
    assert len(lead) > 3 and all(log == lead for log, _ in others)


@pytest.mark.usefixtures("rank_threads")
def test_an_error_of_a_rollout_ends_the_others_and_lets_the_other_ranks_go() -> None:
    async def rollout(engine: EngineLoop, job: Job) -> None:
        completion = await Policy(engine, job, RolloutLimits()).sample(job.prompt.prompt_ids)
        if job.number == 3:
            raise ValueError(f"no good: {len(completion.token_ids)}")
        await Policy(engine, replace(job, number=job.number + 100), RolloutLimits()).sample([1])

    def rank(group: ThreadGroup) -> int:
        engine = BatchDependent()
        if group.rank():
            follow(engine, group)  # type: ignore[arg-type]
        else:
            with pytest.raises(ValueError, match="no good"):
                all_of(rollout, engine, group)
        return engine.num_in_flight

    assert run_ranks(2, rank) == [0, 0]  # requests in flight are cancelled


def test_a_response_that_the_engine_loses_is_named() -> None:
    class Losing(BatchDependent):
        def step(self) -> list[Completion]:
            return [found for found in super().step() if found.request_id != 7]

    with pytest.raises(LostTrajectory, match=r"no completion for prompt 'p3', sample 1\. .*max_restarts"):
        all_of(lambda engine, job: Policy(engine, job, RolloutLimits()).sample(job.prompt.prompt_ids), Losing())


def test_a_pass_arrives_as_it_was_sent() -> None:
    first, second = ([*prompt.prompt_ids] for prompt in PROMPTS[:2])
    requests = [
        Request(2**50, "a 'name'", first, SAMPLING, 2**63 - 1, images=("x", "y")),
        Request(1, "b", first, replace(SAMPLING, temperature=0.0), 0),
        Request(2, "c", second, SAMPLING, 5),
    ]
    made = EnginePass([4, 5], requests, forgets=True, until_finished=True)
    assert EnginePass.decode(made.encode()) == made
    assert EnginePass.decode(EnginePass(pauses=True).encode()) == EnginePass([], [], pauses=True)
    assert EnginePass.decode(EnginePass().encode()) == EnginePass() and not EnginePass().encode()


def test_coroutines_run_inside_of_a_running_loop() -> None:
    async def inner() -> int:
        await asyncio.sleep(0)
        return 5

    async def outer() -> int:
        return run(inner()) + await inner()

    assert asyncio.run(outer()) == 10


def test_limits_of_turns_and_tokens_bound_what_a_policy_samples() -> None:
    async def rollout(engine: EngineLoop, job: Job) -> tuple[int, list[str]]:
        policy, reached = Policy(engine, job, RolloutLimits(max_turns=2)), []
        longest = 0
        for _ in range(3):
            reached.append(policy.reached_limit())
            longest = max(longest, len((await policy.sample([1], max_tokens=1)).token_ids))
        policy.restart()
        return longest, [*reached, policy.reached_limit(2), policy.reached_limit(3)]

    assert all_of(rollout, BatchDependent()) == [(1, ["", "", "turns", "", "turns"])] * 12
    late = Policy(EngineLoop(BatchDependent()), jobs()[0], RolloutLimits(max_seconds=0.0))
    assert late.reached_limit() == "seconds"


def sample(engine: EngineLoop, job: Job, **options: Any) -> Coroutine[Any, Any, Completion]:
    return engine.sample(request_of(job), **options)


def test_out_of_order_the_engine_samples_while_coroutines_work() -> None:
    async def both() -> list[Any]:
        loop = EngineLoop(engine := BatchDependent(), in_order=False)
        busy = loop.begin(asyncio.sleep(60))
        serving = asyncio.create_task(loop.serve())
        found = await asyncio.gather(*(loop.begin(sample(loop, job)) for job in jobs()[:3]))
        busy.cancel()
        loop.pause()
        await serving
        return [len(found), engine.log]

    assert run(both()) == [3, [[0, 1, 2], "compare"]]


def test_requests_beyond_the_slots_are_held_and_sampled_by_another_engine() -> None:
    async def lend() -> None:
        loop = EngineLoop(engine := BatchDependent(), in_order=False, slots=2)
        serving = asyncio.create_task(loop.serve())
        tasks = [loop.begin(sample(loop, job, num_cached=10 - job.number)) for job in jobs()[:5]]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (loop.num_held, loop.num_in_flight, len(engine.states)) == (3, 5, 2)
        moved = loop.move_held(2)
        assert [request.request_id for request in moved] == [4, 3] and loop.num_held == 1
        ids = np.array([7], np.int32)
        loop.resolve(4, Completion(99, ids, np.zeros(1, np.float32), ((0, 1),), "stop"))
        loop.resolve(4, Completion(99, ids, np.zeros(1, np.float32), ((0, 1),), "stop"))
        tasks[3].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [len(each.token_ids) for each in found[:3]] and found[4].token_ids.tolist() == [7]
        assert isinstance(found[3], asyncio.CancelledError) and loop.num_in_flight == 0
        assert max(len(log) for log in engine.log) <= 2
        loop.pause()
        await serving

    run(lend())


def test_a_request_that_nobody_waits_for_is_cancelled_at_the_engine() -> None:
    async def leave() -> list[Any]:
        loop = EngineLoop(engine := BatchDependent(), in_order=False)
        serving, heard = asyncio.create_task(loop.serve()), list[Sequence[int]]()
        endless = replace(jobs()[5], sampling=replace(SAMPLING, max_new_tokens=10**9))
        task = loop.begin(sample(loop, endless, on_tokens=heard.append))
        while not heard:
            await asyncio.sleep(0)
        task.cancel()
        while engine.states:
            await asyncio.sleep(0)
        assert heard[0] and not loop.is_waiting
        loop.pause()
        await serving
        return engine.log

    assert run(leave()) == [[0], ("cancel", [0]), "compare"]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_wait_for_a_pass_ends_if_no_rollout_makes_a_request(in_order: bool) -> None:
    engine = BatchDependent()
    loop = EngineLoop(engine, in_order=in_order)

    async def score_without_sampling(number: int) -> int:
        await asyncio.sleep(0.01)
        return number

    async def play_all() -> list[int]:
        tasks = [loop.begin(score_without_sampling(number)) for number in range(3)]
        await loop.next_pass()
        return await loop.join(tasks)

    assert run(asyncio.wait_for(loop.run(play_all()), 30)) == [0, 1, 2]
    assert not any(isinstance(entry, list) and entry for entry in engine.log)  # no request
