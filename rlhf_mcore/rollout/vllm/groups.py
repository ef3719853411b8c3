"""Engines of several groups of ranks (data parallelism inside one engine): each attends to requests of its own, all share the experts.

Every rank is given every request, as of any engine of several ranks, and deals them out alike. A pass has a part in every group: one
without requests computes a token of nothing, as its experts are needed. After it groups tell each other what has finished.
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
    """An engine with ``rollout.layout.dp`` above 1. What other groups have drawn of a response is known by its length alone."""

    def __init__(self, cfg: RolloutConfig, model: EngineModel) -> None:
        """Start the engine, see :class:`VLLMEngine`."""
        self._size, self._group_of = cfg.layout.dp, dict[int, int]()
        self._elsewhere: dict[int, int] = {}  # tokens drawn of requests in flight in other groups
        self._rank_of_engine = rank_and_world_size()[0] % cfg.layout.num_ranks
        super().__init__(cfg, model)
        from vllm.distributed.parallel_state import get_dp_group

        self._peers, self._own = get_dp_group().cpu_group, get_dp_group().rank_in_group

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Let vLLM find the number of this rank's group: it divides RANK, which counts the ranks of all engines."""
        from vllm.engine.arg_utils import EngineArgs

        usual = EngineArgs.create_engine_config

        def create(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.dict(os.environ, RANK=str(self._rank_of_engine)):
                return usual(*args, **kwargs)

        with mock.patch.object(EngineArgs, "create_engine_config", create):
            yield

    def _options(self, cfg: RolloutConfig, model: EngineModel) -> dict[str, Any]:
        # A pass that is begun ahead in one group would have to be in all.
        return {**super()._options(cfg, model), "async_scheduling": False}

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
        """Choose a group for each request: that with the fewest in flight. Those with the same prompt stay together, up to a share."""
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
        finished = []
        if self._own_in_flight():
            finished = super()._step()
        else:
            self._llm.llm_engine.engine_core.execute_dummy_batch()
        done = {completion.request_id for completion in finished}
        drawn = [(number, count) for number, count in self._num_drawn_here().items() if number not in done]
        reports = all_gather_json([list(map(_plain, finished)), drawn], self._peers)
        others = [report for group, report in enumerate(reports) if group != self._own]
        self._elsewhere = {number: count for _, counts in others for number, count in counts}
        return [_completion(fields) for completions, _ in reports for fields in completions]

    def _own_in_flight(self) -> list[int]:
        return [number for number in self._in_flight if self._group_of[number] == self._own]

    def _num_drawn_here(self) -> dict[int, int]:
        states = self._scheduler.requests
        handles = {number: self._in_flight[number].handle for number in self._own_in_flight()}
        return {number: states[handle].num_output_tokens for number, handle in handles.items() if handle in states}

    def _num_drawn(self) -> dict[int, int]:
        elsewhere = {number: count for number, count in self._elsewhere.items() if number in self._in_flight}
        return self._num_drawn_here() | elsewhere

    def _end(self, request_ids: Sequence[int]) -> None:
        if own := [number for number in request_ids if self._group_of[number] == self._own]:
            super()._end(own)

    def drawn(self, request_ids: Collection[int]) -> dict[int, Sequence[int]]:
        """See :class:`Engine`: those of this rank's group."""
        return super().drawn(set(self._own_in_flight()).intersection(request_ids))


def _plain(completion: Completion) -> list[Any]:
    """Write a completion as JSON values. Of further fields it has drafts alone: others are refused, as are tokens drawn from."""
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
