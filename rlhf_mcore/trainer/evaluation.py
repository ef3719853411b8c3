"""Evaluation of a policy. Training and ``rlhf-mcore evaluate`` share this code for sampling, grading and statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_mcore.config.choices import GRADERS
from rlhf_mcore.coroutines import run
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.protocols import EngineRank, ResponseSampler, RewardFunction
from rlhf_mcore.rewards.graders import answer_of
from rlhf_mcore.trainer import statistics
from rlhf_mcore.trainer.scores import OnError
from rlhf_mcore.trainer.statistics import Graded
from rlhf_mcore.types import Completion, Prompt, Sampling, Score, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import EvaluateConfig

# Every evaluation samples with the same seeds. Two evaluations therefore differ by the policy and not by chance.
# Training steps start at 1, so training rollouts never share a seed with an evaluation.
SEED_STEP = 0
Record = dict[str, Any]  # a line of samples.jsonl
TOKENS = "response_ids"  # record field for the reward model, which reads tokens; removed after scoring
BATCHES_IN_FLIGHT = 4  # responses per batch / decode slots of an engine: fewer slots idle during the longest response


@dataclass(slots=True)
class PolicyEvaluator:
    """Samples responses to ``prompts`` with the engine's current policy, and scores them."""

    prompts: Sequence[Prompt]
    sampler: ResponseSampler
    reward: RewardFunction
    sampling: Sampling
    every: int
    prompts_per_batch: int
    note: Callable[[str], None] = lambda text: None  # shows a line, on the first rank
    on_error: OnError = field(default_factory=OnError)  # drops no response: no score counts as 0
    progress: Callable[[str], None] = lambda text: None

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate after ``step`` steps. Always true before the first step and after the last step."""
        if not self.prompts:
            return False
        return step in (0, num_steps) or (self.every > 0 and step % self.every == 0)

    def run(self, step: int) -> dict[str, float]:
        """Compute means over all prompts, and the accuracy per data source if there are several. Collective over the world.

        The same policy gives the same numbers at every ``step``; see ``SEED_STEP``.

        ``evaluate/accuracy`` is the share of correct responses; see :func:`is_correct`. A reward model only changes
        ``evaluate/reward``. ``evaluate/without_score`` counts the responses for which the reward returned no score
        (``reward.on_error: zero`` or ``drop``). They count as 0. The metric is absent if every response got a score.

        Raises:
            ConfigError: on every rank, if too many responses got no score.
        """
        mine: list[Graded] = []
        causes: list[str] = []
        share = -(-len(self.prompts) // self.sampler.rank.num_engines)
        for batch in batches(self.prompts, self.sampler.rank, self.prompts_per_batch):
            self.progress(f"{len(mine) // self.sampling.n} of {share} prompts")
            for _, score, row in grade(self.sampler, self.reward, self.sampling, batch):
                mine.append(row)
                if score.failure is not None:
                    causes.append(score.cause or score.failure)
        gathered = all_gather_json([[astuple(row) for row in mine], len(causes), causes[:1]])
        means = metrics([Graded(*row) for part, _, _ in gathered for row in part])
        if without := sum(count for _, count, _ in gathered):
            means["evaluate/without_score"] = float(without)
            line = without_score(f"evaluation after step {step}", without, firsts := [first for *_, first in gathered])
            self.note(line)
            total = sum(len(part) for part, *_ in gathered)
            self.on_error.refuse_too_many(without, total, next(first[0] for first in firsts if first))
        return means


def grade(
    sampler: ResponseSampler, reward: RewardFunction, sampling: Sampling, prompts: Sequence[Prompt]
) -> list[tuple[Trajectory, Score, Graded]]:
    """Sample and score ``sampling.n`` responses per prompt. Returns [] on ranks that do not lead their engine."""
    trajectories = sampler.sample(prompts, sampling, step=SEED_STEP) if prompts else []
    sampler.wait()
    scores = run(reward.score(trajectories))
    return [(t, s, to_graded(t, s)) for t, s in zip(trajectories, scores, strict=True)]


def without_score(what: str, count: int, causes: Sequence[Sequence[str]]) -> str:
    """Return a line that reports ``count`` responses without a score. ``causes``: at most the first cause of each rank."""
    first = next(cause for own in causes for cause in own)
    return f"{what}: {count} responses got no score and count as 0; the first: {first}"


def sample_record(trajectory: Trajectory, verdict: Score, row: Graded) -> Record:
    """Build a line of samples.jsonl. It excludes values that depend on the machine's rounding, such as logprobs."""
    return {
        "prompt_id": row.prompt_id,
        "index": row.index,
        "sample": row.sample,
        "data_source": row.data_source,
        "prompt": trajectory.prompt.text,
        "response": trajectory.response_text,
        "ground_truth": trajectory.prompt.ground_truth,
        "score": row.score,
        "parts": verdict.parts,
        "correct": row.correct,
        "answer": row.answer,
        "num_tokens": row.num_tokens,
        "truncated": row.truncated,
    }


def evaluation_sampling(cfg: EvaluateConfig, max_new_tokens: int, seed: int) -> Sampling:
    """Return the sampling parameters of an evaluation, in training and in the command.

    ``max_new_tokens``: the limit of training. It applies if ``cfg`` sets no limit.
    """
    return Sampling(
        n=cfg.samples,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        max_new_tokens=cfg.max_new_tokens or max_new_tokens,
        seed=seed,
    )


def prompts_per_batch(samples: int, slots: int) -> int:
    """Return the number of prompts per batch of an engine. ``slots``: responses that the engine decodes concurrently."""
    return max(BATCHES_IN_FLIGHT * slots // samples, 1)


def batches(prompts: Sequence[Prompt], engine: EngineRank, size: int) -> Iterator[list[Prompt]]:
    """Yield the batches of this rank's engine. The engine gets every ``num_engines``-th prompt, in batches of ``size``.

    Training and the command use the same batches, so the engine rounds in the same way. All engines yield equally many batches,
    because a reward model scores with all ranks. The last batch of an engine may be empty.
    """
    mine = list(prompts[engine.engine_index :: engine.num_engines])
    longest = len(prompts[:: engine.num_engines])
    for start in range(0, longest, size):
        yield mine[start : start + size]


def missing_batches(
    prompts: Sequence[Prompt], engine: EngineRank, size: int, done: Collection[int]
) -> Iterator[list[Prompt]]:
    """Yield the prompts of each batch whose index is not in ``done``, except for batches without such a prompt.

    Batch boundaries do not depend on ``done``, so a resumed evaluation uses the same batches.
    """
    for batch in batches(prompts, engine, size):
        if missing := [prompt for prompt in batch if prompt.index not in done]:
            yield missing


def to_graded(trajectory: Trajectory, verdict: Score) -> Graded:
    """Extract the fields of a scored response that the statistics use."""
    prompt = trajectory.prompt
    return Graded(
        prompt_id=prompt.prompt_id,
        index=prompt.index,
        data_source=prompt.data_source,
        sample=trajectory.sample,
        score=verdict.value,
        correct=is_correct(verdict.value, verdict.parts),
        answer=answer_of(trajectory.response_text),
        num_tokens=trajectory.num_sampled,
        truncated=trajectory.is_truncated,
    )


def graded_of(record: Mapping[str, Any]) -> Graded:
    """Extract the fields of a samples.jsonl line that the statistics use."""
    return Graded(**{item.name: record[item.name] for item in fields(Graded)})


def is_correct(value: float, parts: dict[str, float]) -> bool:
    """Return whether every rule gives its full mark. Without rules, return whether the score is at least 1.

    Other parts come from functions, models, judges and environments. They are user metrics and define no full mark.
    """
    grades = [part for name, part in parts.items() if name in GRADERS]
    return all(grade >= 1.0 for grade in grades) if grades else value >= 1.0


def metrics(rows: Sequence[Graded]) -> dict[str, float]:
    """Return ``statistics.means`` under the names of metrics.jsonl."""
    named = {f"evaluate/{name}": value for name, value in statistics.means(rows).items()}
    by_source = statistics.sources(rows)
    if len(by_source) > 1:
        for source, own in by_source.items():
            named[f"evaluate/accuracy/{source}"] = statistics.means(own)["accuracy"]
    return named


def with_tokens(record: Record, trajectory: Trajectory) -> Record:
    """Return the record with the response tokens, which the reward model will score."""
    return record | {TOKENS: trajectory.sampled_ids.tolist()}


@dataclass(frozen=True, slots=True)
class RecordedScores:
    """A grader that returns stored scores of other graders."""

    scores: dict[tuple[int, int], Score]  # (row of the prompt, sample)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory, in order."""
        return [self.scores[t.prompt.index, t.sample] for t in trajectories]


def score_records(
    prompts: Sequence[Prompt],
    records: Sequence[Record],
    engine: EngineRank,
    size: int,
    add_model: Callable[[RewardFunction], RewardFunction],
) -> list[Record]:
    """Return the records of this rank's engine with the reward model's score added. Collective over the world.

    Args:
        prompts: all prompts of the evaluation.
        records: records of all responses, with ``TOKENS``; the same on every rank.
        engine: this rank's position among the engines that sampled the responses.
        size: prompts per batch of an engine.
        add_model: wraps other graders into the reward of training.
    """
    by_prompt: dict[int, list[Record]] = {}
    for record in records:
        by_prompt.setdefault(record["index"], []).append(record)
    known = {(r["index"], r["sample"]): Score(r["score"], r["parts"]) for r in records}
    reward = add_model(RecordedScores(known))
    scored = []
    for batch in batches(prompts, engine, size):
        mine = [(p, r) for p in batch for r in by_prompt[p.index]] if engine.is_lead else []
        scores = run(reward.score([_trajectory(*pair) for pair in mine]))
        for (_, record), score in zip(mine, scores, strict=True):
            correct = is_correct(score.value, score.parts)
            whole = record | {"score": score.value, "parts": score.parts, "correct": correct}
            scored.append({name: value for name, value in whole.items() if name != TOKENS})
    return scored


def _trajectory(prompt: Prompt, record: Record) -> Trajectory:
    token_ids = np.array(record[TOKENS], np.int32)
    reason = "length" if record["truncated"] else "stop"
    completion = Completion(0, token_ids, np.zeros(len(token_ids), np.float32), ((0, 0),), reason)
    return episode(prompt, record["sample"], [completion], record["response"])
