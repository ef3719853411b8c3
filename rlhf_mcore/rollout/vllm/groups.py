"""Data parallelism inside one engine: groups of ranks that run their own requests and share the experts.

Every rank gets every request, as in any engine with several ranks, and assigns requests to groups in the same way. Every
group takes part in each pass. A group without requests runs a dummy token, because its experts are needed. After each pass,
groups gather three numbers each, and their completions only if a group has finished some.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.rollout.vllm.engine import VLLMEngine
from rlhf_mcore.rollout.vllm.environment import rank_and_world_size
from rlhf_mcore.types import DRAFTS, Completion, Recorded, Request

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.rollout.engine import EngineModel


class GroupedVLLMEngine(VLLMEngine):
    """An engine with ``rollout.layout.dp`` above 1. Only a request's own group knows the progress of its response."""

    def __init__(self, cfg: RolloutConfig, model: EngineModel) -> None:
        """Start the engine; see :class:`VLLMEngine`."""
        self._size, self._group_of = cfg.layout.dp, dict[int, int]()
        self._num_sampled_tokens = 0  # total of all groups
        self._num_passes = 0
        self._rank_of_engine = rank_and_world_size()[0] % cfg.layout.num_ranks
        super().__init__(cfg, model)
        from vllm.distributed.parallel_state import get_dp_group

        self._peers, self._own = get_dp_group().cpu_group, get_dp_group().rank_in_group
        self._count_passes(empty_too=not self._worker().vllm_config.use_v2_model_runner)

    def _count_passes(self, *, empty_too: bool) -> None:
        """Count the passes of vLLM's steps, because groups must run them together.

        A step runs no pass if it only collects the result of a pass that was started ahead (asynchronous scheduling), or
        schedules no token. ``empty_too``: vLLM's first model runner (0.32) then runs a dummy pass by itself.
        """
        executor = self._core.model_executor
        usual = executor.execute_model

        def execute(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._num_passes += empty_too or scheduled.total_num_scheduled_tokens > 0
            return usual(scheduled, *args, **kwargs)

        executor.execute_model = execute

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    @contextmanager
    def _set_group_number(self) -> Iterator[None]:
        """Let vLLM compute the number of this rank's group. vLLM derives it from RANK, which counts the ranks of all engines."""
        from vllm.engine.arg_utils import EngineArgs

        usual = EngineArgs.create_engine_config

        def create(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.dict(os.environ, RANK=str(self._rank_of_engine)):
                return usual(*args, **kwargs)

        with mock.patch.object(EngineArgs, "create_engine_config", create):
            yield

    def _begin(self, requests: Sequence[Request], limits: Sequence[int]) -> list[str]:
        handles, groups = [""] * len(requests), self._deal(requests)
        own = [place for place, group in enumerate(groups) if group == self._own]
        if own:
            begun = super()._begin([requests[place] for place in own], [limits[place] for place in own])
            for place, handle in zip(own, begun, strict=True):
                handles[place] = handle
        self._group_of = {number: self._group_of[number] for number in self._in_flight}
        self._group_of |= {request.request_id: group for request, group in zip(requests, groups, strict=True)}
        return handles

    def _deal(self, requests: Sequence[Request]) -> list[int]:
        """Assign each request to the group with the fewest requests. Equal prompts stay together, up to an equal share."""
        load = [0] * self._size
        for request_id in self._in_flight:
            load[self._group_of[request_id]] += 1
        share, groups = -(-len(requests) // self._size), list[int]()
        for _, same in groupby(requests, key=lambda request: tuple(request.prompt_ids)):
            left = len(list(same))
            while left:
                group, count = load.index(min(load)), min(left, share)
                groups += [group] * count
                load[group] += count
                left -= count
        return groups

    def _step(self) -> list[Completion]:
        finished, before, preemptions = list[Completion](), self._num_sampled(), self._preemptions
        passes = self._num_passes
        if self._own_in_flight() or self._core.batch_queue:
            finished = super()._step()
        if self._num_passes == passes:
            self._core.execute_dummy_batch()
        done = {completion.request_id: len(completion.token_ids) for completion in finished}
        drawn = sum((self._num_sampled() | done).values()) - sum(before.values())
        counts = _gather_counts([len(finished), drawn, self._preemptions - preemptions], self._peers)
        num_finished, drawn, preempted = map(sum, zip(*counts, strict=True))
        self._num_sampled_tokens += drawn
        self._preemptions = preemptions + preempted
        if not num_finished:
            return []
        reports = all_gather_json(list(map(_plain, finished)), self._peers)
        return [_completion(fields) for report in reports for fields in report]

    def _settle(self) -> None:
        """See :class:`VLLMEngine`. Continue until no group has a pass started ahead. All groups run the same passes meanwhile."""
        if not self._in_flight:
            return
        from vllm.v1.core.sched.interface import PauseState

        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while any(map(sum, _gather_counts([len(self._core.batch_queue or ())], self._peers))):
                self._finished += self._drop_finished(self._step())
        finally:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def _own_in_flight(self) -> list[int]:
        return [number for number in self._in_flight if self._group_of[number] == self._own]

    def _num_sampled(self) -> dict[int, int]:
        """Count the tokens of this group's requests. Other requests get their versions from their own group."""
        states = self._scheduler.requests
        handles = {number: self._in_flight[number].handle for number in self._own_in_flight()}
        return {number: states[handle].num_output_tokens for number, handle in handles.items() if handle in states}

    @property
    def num_sampled_tokens(self) -> int:
        """See :class:`Engine`. Includes the tokens of cancelled requests."""
        return self._num_sampled_tokens

    def _end(self, request_ids: Sequence[int]) -> None:
        if own := [number for number in request_ids if self._group_of[number] == self._own]:
            super()._end(own)

    def sampled_tokens(self, request_ids: Collection[int]) -> dict[int, Sequence[int]]:
        """See :class:`Engine`. Only requests of this rank's group."""
        return super().sampled_tokens(set(self._own_in_flight()).intersection(request_ids))


def _gather_counts(counts: Sequence[int], group: Any) -> list[list[int]]:
    """Gather a few numbers from every rank of a group."""
    import torch
    import torch.distributed as dist

    parts = [torch.empty(len(counts), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, torch.tensor(counts), group)
    return [part.tolist() for part in parts]


def _plain(completion: Completion) -> list[Any]:
    """Convert a completion to JSON values. With data parallelism, drafts are the only supported recorded field."""
    drafts = completion.fields.get(DRAFTS)
    return [
        completion.request_id,
        completion.token_ids.tolist(),
        completion.logprobs.tolist(),
        completion.versions,
        completion.finish_reason,
        completion.num_cached,
        None if drafts is None else np.asarray(drafts).tolist(),
    ]


def _completion(fields: Sequence[Any]) -> Completion:
    number, token_ids, logprobs, versions, reason, num_cached, drafts = fields
    ids, values = np.array(token_ids, np.int32), np.array(logprobs, np.float32)
    recorded: dict[str, Recorded] = {} if drafts is None else {DRAFTS: np.array(drafts, np.int16)}
    return Completion(number, ids, values, tuple(map(tuple, versions)), reason, num_cached=num_cached, fields=recorded)
