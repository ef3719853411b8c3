"""Run engines of several rank groups: the samples of each group, and the data that they exchange.

Groups are threads with stand-ins.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from rlhf_mcore.config.rules.rollout import engine_keys
from rlhf_mcore.config.schema.rollout import RolloutLayoutConfig
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.rollout.vllm import cpu, groups
from rlhf_mcore.types import DRAFTS, Completion, Request, Sampling
from tests.unit.rollout.test_vllm_states import LLM, engine


class Drawing(LLM):
    """An engine that samples a token per request and pass.

    A request ends after as many tokens as its prompt has. Records dummy passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.engine_core = self
        self.scheduler: Any = SimpleNamespace(requests={})
        self.batch_queue: deque[Any] | None = None
        self.model_executor = SimpleNamespace(execute_model=self._execute)

    def _execute(self, scheduled: Any, non_block: bool = False) -> Any:
        if scheduled.total_num_scheduled_tokens:
            self.told.append("pass")
        return make_future("nothing to sample")

    def enqueue(self, prompts: Any, params: Any, use_tqdm: bool) -> list[str]:
        first = self.request_counter.counter
        self.request_counter.counter += len(prompts)
        handles = [str(first + place) for place in range(len(prompts))]
        for handle, prompt in zip(handles, prompts, strict=True):
            ids = prompt["prompt_token_ids"]
            self.scheduler.requests[handle] = SimpleNamespace(ids=ids, num_output_tokens=0, output_token_ids=[])
        return handles

    def step(self) -> list[Any]:
        self.model_executor.execute_model(SimpleNamespace(total_num_scheduled_tokens=len(self.scheduler.requests)))
        return self.draw(list(self.scheduler.requests))

    def draw(self, handles: list[str]) -> list[Any]:
        ended = []
        for handle in handles:
            state = self.scheduler.requests[handle]
            state.output_token_ids.append(state.ids[0])
            state.num_output_tokens += 1
            if state.num_output_tokens == len(state.ids):
                del self.scheduler.requests[handle]
                logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in state.output_token_ids]
                drawn = SimpleNamespace(token_ids=state.output_token_ids, logprobs=logprobs, finish_reason="length")
                ended.append(
                    SimpleNamespace(
                        request_id=handle,
                        prompt_token_ids=state.ids,
                        outputs=[drawn],
                        finished=True,
                        num_cached_tokens=0,
                    )
                )
        return ended

    def execute_dummy_batch(self) -> None:
        self.told.append("dummy")


class DrawingAhead(Drawing):
    """An engine that begins a pass before it has the previous result: vLLM's own step with a scheduler that plans ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_queue, self.paused = deque(), False
        self.scheduler = SimpleNamespace(
            requests={},
            has_requests=lambda: not self.paused and bool(self.scheduler.requests),
            schedule=self._schedule,
            get_grammar_bitmask=lambda _: None,
            update_from_output=lambda scheduled, _: self.draw(scheduled.handles),
            set_pause_state=lambda state: setattr(self, "paused", state == PauseState.PAUSED_ALL),
        )
        self.model_executor.sample_tokens = lambda *_, **__: make_future("tokens")
        self.core = mock.MagicMock(batch_queue=self.batch_queue, batch_queue_size=2, scheduler=self.scheduler)
        self.core.is_mm_encoder_only = self.core.is_pooling_model = False
        self.core.model_executor, self.core.use_spec_decode = self.model_executor, False

    def _schedule(self, _throttles: Any) -> Any:
        states = self.scheduler.requests
        handles = [name for name, state in states.items() if getattr(state, "planned", 0) < len(state.ids)]
        for handle in handles:
            states[handle].planned = getattr(states[handle], "planned", 0) + 1
        return SimpleNamespace(
            total_num_scheduled_tokens=len(handles), handles=handles, pending_structured_output_tokens=False
        )

    def step(self) -> list[Any]:
        ended, _ = EngineCore.step_with_batch_queue(self.core)
        return ended or []


def make_future(value: Any) -> Future[Any]:
    future = Future[Any]()
    future.set_result(value)
    return future


class Meeting:
    """A gather among threads."""

    def __init__(self, size: int) -> None:
        self._barrier, self._values = threading.Barrier(size, timeout=10), [None] * size
        self.num_calls = 0

    def __call__(self, value: Any, rank: int) -> list[Any]:
        self.num_calls += rank == 0
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


def build_engine(rank: int, size: int, kind: type[Drawing] = Drawing) -> Any:
    made = object.__new__(groups.GroupedVLLMEngine)
    made.__dict__ |= engine(kind()).__dict__
    made._size, made._own, made._peers, made._num_ranks = size, rank, rank, size
    made._group_of, made._num_sampled_tokens, made._num_passes, made._routes = {}, 0, 0, None
    made._count_passes(empty_too=False)
    made.rank = EngineRank(0, 1, is_lead=rank == 0)
    made.commit_load(3)
    return made


def requests(prompts: list[list[int]]) -> list[Request]:
    return [Request(number, f"p{number}", prompt, Sampling(), number) for number, prompt in enumerate(prompts)]


def test_requests_go_to_the_group_with_the_fewest_and_those_of_a_prompt_stay_together() -> None:
    which = build_engine(0, 2)
    assert which._deal(requests([[1], [1], [2], [2]])) == [0, 0, 1, 1]
    assert which._deal(requests([[1], [1], [1], [2]])) == [0, 0, 1, 1]  # each share is two
    assert which._deal(requests([[1]] * 5)) == [0, 0, 0, 1, 1]
    which._in_flight, which._group_of = {7: None}, {7: 0}
    assert which._deal(requests([[1]])) == [1]


def test_every_rank_sees_every_completion_and_how_far_the_others_are() -> None:
    engines, completions, numbers = [build_engine(rank, 2) for rank in range(2)], Meeting(2), Meeting(2)
    drawn: dict[int, list[Completion]] = {}
    counts: dict[int, list[int]] = {0: [], 1: []}

    def draw(rank: int) -> None:
        which = engines[rank]
        while which.num_in_flight:
            drawn.setdefault(rank, []).extend(which.step())
            counts[rank].append(which.num_sampled_tokens)

    for which in engines:
        which.submit(requests([[5], [6, 6, 6]]))
    with mock.patch.multiple(groups, all_gather_json=completions, _gather_counts=numbers):
        threads = [threading.Thread(target=draw, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert counts == {0: [2, 3, 4], 1: [2, 3, 4]}
    assert (numbers.num_calls, completions.num_calls) == (3, 2)  # nothing finishes in the second step
    assert engines[0]._llm.told == ["pass", "dummy", "dummy"] and engines[1]._llm.told == ["pass"] * 3
    for rank in range(2):
        found = {c.request_id: (c.token_ids.tolist(), c.logprobs.tolist(), c.versions) for c in drawn[rank]}
        assert found == {0: ([5], [-0.5], ((0, 3),)), 1: ([6, 6, 6], [-0.5] * 3, ((0, 3),))}


def test_groups_make_every_pass_together_if_they_begin_it_ahead() -> None:
    """The responses of the first group end earlier. New weights arrive while both groups run a pass that they began ahead."""
    engines, meetings = [build_engine(rank, 2, DrawingAhead) for rank in range(2)], (Meeting(2), Meeting(2))
    drawn: dict[int, list[int]] = {0: [], 1: []}
    passes: dict[int, list[int]] = {0: [], 1: []}
    left: dict[int, int] = {}

    def step(rank: int) -> None:
        drawn[rank] += [completion.request_id for completion in engines[rank].step()]
        passes[rank].append(sum(told in ("pass", "dummy") for told in engines[rank]._llm.told))

    def draw(rank: int) -> None:
        for _ in range(3):
            step(rank)
        engines[rank]._settle()
        left[rank] = len(engines[rank]._llm.batch_queue)
        while engines[rank].num_in_flight:
            step(rank)

    for which in engines:
        which.submit(requests([[5, 5], [6] * 7]))
    with mock.patch.multiple(groups, all_gather_json=meetings[0], _gather_counts=meetings[1]):
        threads = [threading.Thread(target=draw, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert drawn == {0: [0, 1], 1: [0, 1]} and left == {0: 0, 1: 0}
    assert passes[0] == passes[1] and passes[0][:3] == [1, 2, 3]
    assert [which.num_sampled_tokens for which in engines] == [9, 9]


def test_the_drafts_of_a_response_are_known_in_all_groups() -> None:
    drafts = np.array([[2, 2], [0, 0], [0, 0]], np.int16)
    for fields in ({}, {DRAFTS: drafts}):
        ids, logprobs = np.array([5, 6, 7], np.int32), np.array([-0.5, -0.25, -1], np.float32)
        given = Completion(4, ids, logprobs, ((0, 3),), "length", num_cached=2, fields=fields)
        found = groups._completion(json.loads(json.dumps(groups._plain(given))))
        assert (found.request_id, found.versions, found.num_cached) == (4, ((0, 3),), 2)
        assert found.fields.keys() == fields.keys()
        assert all(np.array_equal(found.fields[name], fields[name]) for name in fields)
    assert found.fields[DRAFTS].dtype == np.int16


def test_a_cancelled_request_is_dropped_by_its_group() -> None:
    which = build_engine(1, 2)
    which.submit(requests([[5, 5], [6, 6]]))
    which.cancel([0, 1])
    assert which._llm.told == [("abort", "40")] and which.num_in_flight == 0


def test_experts_of_other_ranks_get_no_weight() -> None:
    kernel = mock.Mock()
    cpu._apply_own(
        kernel,
        topk_weights=torch.tensor([[0.75, 0.25], [0.5, 0.5]]),
        topk_ids=torch.tensor([[3, 0], [1, 2]], dtype=torch.int32),
        expert_map=torch.tensor([-1, -1, 0, 1], dtype=torch.int32),
    )
    given = kernel.apply_all.call_args.kwargs
    assert given["topk_weights"].tolist() == [[0.75, 0.0], [0.0, 0.5]]
    assert given["topk_ids"].tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize(("sizes", "rank"), [((2, 1), 0), ((2, 1), 1), (None, 0)])
def test_rows_of_unequal_parts_are_gathered_and_summed_up(sizes: Any, rank: int) -> None:
    """The two ranks have equal rows, up to their counts."""
    rows = torch.arange(6.0).view(3, 2)
    mine = rows[: 2 if sizes is None else sizes[rank]]
    communicator = SimpleNamespace(world_size=2, rank_in_group=rank, device_group=None)

    def all_gather(parts: list[torch.Tensor], part: torch.Tensor, group: Any) -> None:
        for other in parts:
            other.copy_(rows[:2])

    with mock.patch("torch.distributed.all_gather", all_gather):
        gathered = cpu._all_gather_rows(communicator, [mine], sizes=sizes)[0]
    assert gathered.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]][: sum(sizes or (2, 2))]
    summed = torch.cat([rows, rows[:1]]) if sizes is None else rows
    with mock.patch("torch.distributed.all_reduce", lambda tensor, group: tensor.mul_(2)):
        part = cpu._reduce_scatter_rows(communicator, summed, sizes=sizes)
    expected = {(0, True): [[0, 2], [4, 6]], (1, True): [[8, 10]], (0, False): [[0, 2], [4, 6]]}
    assert part.tolist() == expected[rank, sizes is not None]


def test_keys_of_a_layout() -> None:
    assert engine_keys(RolloutLayoutConfig(tp=2)) == "rollout.layout.tp"
    assert engine_keys(RolloutLayoutConfig(tp=2, pp=2, dp=3)) == "rollout.layout.tp*pp*dp"
    assert RolloutLayoutConfig(tp=2, pp=2, dp=3).num_ranks == 12
