"""Prompts, trajectories and scores for tests of the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from rlhf_mcore.protocols import EngineRank, StepwiseEngine
from rlhf_mcore.trainer.batches import BatchSampler
from rlhf_mcore.types import Completion, Prompt, Request, Score, TrainBatch, Trajectory
from tests.episodes import single_turn
from tests.rows import padded_batch


def prompt(index: int, length: int = 2) -> Prompt:
    return Prompt(f"p{index}", index, [100 + index] * length, f"prompt {index}", data_source="set")


def trajectory(made_of: Prompt, sample: int, length: int = 3, finish: str = "stop") -> Trajectory:
    """Return a trajectory whose values identify it: token id 1000 (prompt + 1) + 100 sample + t, and logprob -id / 1000."""
    ids = [1000 * (made_of.index + 1) + 100 * sample + t for t in range(length)]
    return single_turn(made_of, sample, ids, [-i / 1000 for i in ids], f"answer {sample}", finish, 0)


def completions(
    requests: Sequence[Request], length: Callable[[int], int] = lambda index: 3, truncated: Sequence[int] = ()
) -> list[Completion]:
    """Return completions with the tokens of ``trajectory``. Those for prompts in ``truncated`` reach the length limit."""
    drawn, samples = [], Counter[int]()
    for request in requests:
        index = request.prompt_ids[0] - 100
        made = trajectory(prompt(index), samples[index], length(index), "length" if index in truncated else "stop")
        samples[index] += 1
        drawn.append(
            Completion(request.request_id, made.sampled_ids, made.sampled_logprobs, ((0, 0),), made.finish_reason)
        )
    return drawn


class Streaming:
    """A StepwiseEngine that answers all requests of the last submission in a step, with ``draw``."""

    def __init__(self) -> None:
        self.sampled: list[Completion] | None = None

    def draw(self, requests: Sequence[Request]) -> list[Completion]:
        return completions(requests)

    @property
    def num_in_flight(self) -> int:
        return self.sampled is not None

    def submit(self, requests: Sequence[Request]) -> None:
        self.sampled = self.draw(requests)

    def step(self) -> list[Completion]:
        assert self.sampled is not None
        sampled, self.sampled = self.sampled, None
        return sampled

    def cancel(self, request_ids: Collection[int]) -> None:
        assert self.sampled is None, "nothing in flight is cancelled"

    def forget_prefixes(self) -> None: ...

    def compare_ranks(self) -> None: ...

    def sampled_tokens(self, request_ids: Collection[int]) -> dict[int, list[int]]:
        return {}


def batch_sampler(generator: StepwiseEngine, engine: EngineRank | None = None) -> BatchSampler:
    """Return a batch sampler that decodes completions to texts with their sample."""
    return BatchSampler(
        generator, engine or EngineRank(), lambda rows: [f"answer {ids[0] % 1000 // 100}" for ids in rows]
    )


def score(made_of: Trajectory) -> Score:
    """Return a score that identifies prompt index and sample of a trajectory."""
    return Score(made_of.prompt.index + made_of.sample / 10)


def rows_of(batch: TrainBatch) -> list[tuple[int, list[int], list[float], float]]:
    """Return (group, token ids, logprobs of the response, score) of every row. Collective over the world."""
    whole = padded_batch(batch)
    return [
        (
            int(batch.group_ids[row]),
            whole.token_ids[row, : batch.lengths[row]].tolist(),
            whole.rollout_logprobs[row][whole.loss_mask[row]].tolist(),
            float(batch.scores[row]),
        )
        for row in range(batch.num_rows)
    ]
