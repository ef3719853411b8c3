"""Rollouts on an engine that answers each request separately: errors, places and progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from rlhf_mcore.coroutines import run
from rlhf_mcore.sampling import served_loop
from rlhf_mcore.sampling.served_loop import ServedLoop
from rlhf_mcore.types import Completion, Request, Sampling


class Answering:
    """An AsyncEngine. It fails on empty prompts, and gives no token to prompts that begin with 0."""

    on_progress: Callable[[], object] | None = None

    async def answer(self, request: Request) -> Completion:
        await asyncio.sleep(0.01)
        if not request.prompt_ids:
            raise RuntimeError("the engine failed")
        ids = np.array(request.prompt_ids if request.prompt_ids[0] else [], np.int32)
        return Completion(request.request_id, ids, np.zeros(len(ids), np.float32), ((0, 0),), "stop")


def request(*prompt_ids: int) -> Request:
    return Request(0, "prompt", list(prompt_ids), Sampling(), seed=0)


def test_an_error_of_the_engine_ends_the_run_even_if_a_rollout_drops_it() -> None:
    loop = ServedLoop(Answering())

    async def drop_errors() -> None:
        with pytest.raises(RuntimeError):
            await loop.sample(request())
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="the engine failed"):
        run(loop.run(drop_errors()))


def test_a_rollout_may_drop_a_response_that_is_not_valid() -> None:
    loop = ServedLoop(Answering())

    async def sample_two() -> list[int]:
        with pytest.raises(RuntimeError, match="no token"):
            await loop.sample(request(0))
        return (await loop.sample(request(7))).token_ids.tolist()

    assert run(loop.run(sample_two())) == [7]


def test_rollouts_get_places_in_order_and_a_pass_ends_with_each_completion() -> None:
    loop, begun, most = ServedLoop(Answering(), places=2), list[int](), 0

    async def play(number: int) -> int:
        nonlocal most
        async with loop.place():
            begun.append(number)
            most = max(most, loop.num_in_flight + 1)
            return int((await loop.sample(request(number))).token_ids[0])

    async def play_all() -> list[int]:
        tasks = [loop.begin(play(number)) for number in range(1, 6)]
        await loop.next_pass()
        assert any(task.done() for task in tasks) and not tasks[-1].done()
        return await loop.join(tasks)

    assert run(loop.run(play_all())) == begun == [1, 2, 3, 4, 5]
    assert most == 2 and loop.num_in_flight == 0


def test_progress_is_reported_only_while_a_request_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_loop, "_PROGRESS_S", 0.001)
    engine, reports = Answering(), list[int]()
    loop = ServedLoop(engine)
    engine.on_progress = lambda: reports.append(loop.num_in_flight)

    async def play() -> None:
        await loop.sample(request(1))
        await asyncio.sleep(0.05)

    run(loop.run(play()))
    assert set(reports) == {1}


def test_a_wait_for_a_pass_ends_if_no_rollout_makes_a_request() -> None:
    loop = ServedLoop(Answering())

    async def play_all() -> list[int]:
        tasks = [loop.begin(asyncio.sleep(0.01, number)) for number in range(3)]
        await loop.next_pass()
        return await loop.join(tasks)

    assert run(asyncio.wait_for(loop.run(play_all()), 30)) == [0, 1, 2]
