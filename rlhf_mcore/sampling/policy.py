"""The interface of the policy for rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_mcore.sampling.requests import request_of
from rlhf_mcore.sampling.seeds import turn_seed

if TYPE_CHECKING:
    from rlhf_mcore.sampling.engine_loop import EngineLoop
    from rlhf_mcore.types import Completion, Prompt, Sampling

_TURNS = 2**40  # request id of a turn = rollout number + _TURNS * turn number


@dataclass(frozen=True, slots=True)
class Job:
    """Describes a rollout: response ``sample`` to ``prompt`` at ``step``. ``number`` is unique per engine."""

    number: int
    prompt: Prompt
    sample: int
    sampling: Sampling
    step: int


class Policy:
    """Samples the turns of one rollout. The job and the turn number determine the seed of a turn."""

    def __init__(self, engine: EngineLoop, job: Job) -> None:
        self._engine, self._num_turns = engine, 0
        self._first = request_of(job.number, job.prompt, job.sample, job.sampling, job.step)

    async def sample(self, tokens: Sequence[int], *, images: tuple[str, ...] = ()) -> Completion:
        """Sample a turn after ``tokens``. ``images``: digests, in the order of their tokens.

        Raises:
            RuntimeError: the response is not valid for training.
        """
        request, turn = replace(self._first, prompt_ids=tokens, images=images), self._num_turns
        self._num_turns += 1
        if turn:
            number, name = request.request_id + turn * _TURNS, f"{request.name}, turn {turn}"
            request = replace(request, request_id=number, name=name, seed=turn_seed(request.seed, turn))
        return await self._engine.sample(request)
