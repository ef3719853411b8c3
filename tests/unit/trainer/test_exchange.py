"""A world of one holds all trajectories. What data-parallel ranks make of the rows is in tests/unit/roles."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.sampling.engine_loop import LostTrajectory
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.metrics import rollout_metrics
from rlhf_mcore.trainer.scores import OnError, ScoreFacts
from rlhf_mcore.types import Score, TrainBatch, Trajectory
from tests.episodes import sampled_batch, single_turn
from tests.messages import expect_error
from tests.rows import pad_rows
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.trainer.records import prompt, rows_of, score, trajectory

pytestmark = pytest.mark.usefixtures("world")

SAMPLES = 3
PROMPTS = [prompt(i, length=1 + i % 3) for i in range(8)]


def make_trajectories(seed: int = 0) -> tuple[list[int], list[Trajectory]]:
    """Trajectories of different lengths, in the order of an engine: prompt after prompt."""
    lengths = random.Random(seed)
    positions = [place for place in range(len(PROMPTS)) for _ in range(SAMPLES)]
    return positions, [trajectory(PROMPTS[p], k % SAMPLES, lengths.randint(1, 12)) for k, p in enumerate(positions)]


def call(positions: list[int], trajectories: list[Trajectory]) -> TrainBatch:
    batch, _ = RowExchange(SAMPLES)(sampled_batch(PROMPTS, positions, trajectories, [score(t) for t in trajectories]))
    return batch


def test_every_row_is_there_whole() -> None:
    positions, trajectories = make_trajectories()
    rows = rows_of(call(positions, trajectories))
    assert len(rows) == 24
    for row, (group, ids, logprobs, value) in enumerate(rows):
        source = trajectories[row]
        assert group == row // 3 == source.prompt.index
        assert ids == PROMPTS[group].prompt_ids + source.sampled_ids.tolist()
        assert logprobs == source.logprobs[source.loss_mask].tolist()
        assert value == group + (row % 3) / 10  # in double precision


def test_the_order_of_arrival_does_not_matter() -> None:
    positions, trajectories = make_trajectories()
    trajectories[7].finish_reason = "length"
    expected = call(positions, trajectories)
    order = list(range(24))
    random.Random(5).shuffle(order)
    found = call([positions[k] for k in order], [trajectories[k] for k in order])
    assert rows_of(found) == rows_of(expected)
    assert found.truncated.nonzero().tolist() == expected.truncated.nonzero().tolist() == [[7]]


def test_a_prompt_that_a_step_holds_twice_makes_two_groups() -> None:
    twice = [PROMPTS[0], PROMPTS[0]]
    trajectories = [trajectory(PROMPTS[0], k % 2, length=k + 1) for k in range(4)]
    batch, _ = RowExchange(2)(sampled_batch(twice, [0, 0, 1, 1], trajectories, [Score(float(k)) for k in range(4)]))
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.scores.tolist() == [0, 1, 2, 3]


def test_scores_parts_and_truncation_follow_their_rows() -> None:
    one = [prompt(0)]
    trajectories = [trajectory(one[0], 1, 5, "length"), trajectory(one[0], 0, 2)]
    trajectories[0].num_prefilled, trajectories[0].num_cached = 40, 10  # the other one's engine does not count
    scores = [Score(0.1, {"format": 1.0, "answer": 0.0}), Score(-2.0, {"format": 0.5})]
    batch, facts = RowExchange(2)(sampled_batch(one, [0, 0], trajectories, scores))
    assert facts.prefix_hit == 0.25 and rollout_metrics(batch, facts)["timing/prefix_hit"] == 0.25
    assert batch.scores.dtype == torch.float64 and batch.scores.tolist() == [-2.0, 0.1]
    assert batch.num_sampled.tolist() == [2, 5] and batch.truncated.tolist() == [False, True]
    assert facts.part_means == {"format": 0.75, "answer": 0.0}


def test_an_empty_response_keeps_its_row() -> None:
    one = [prompt(0)]
    trajectories = [trajectory(one[0], 0, 0), trajectory(one[0], 1, 2)]
    batch, _ = RowExchange(2)(sampled_batch(one, [0, 0], trajectories, [Score(1.0), Score(2.0)]))
    assert batch.lengths.tolist() == [2, 4] and batch.num_sampled.tolist() == [0, 2]
    assert batch.scores.tolist() == [1.0, 2.0]


def test_large_token_ids_are_exact() -> None:
    one = [prompt(0)]
    made_of = single_turn(one[0], 0, [2**31 - 1, 2**24 + 1], [-1.0, -2.0], "", "stop", 0)
    batch, _ = RowExchange(1)(sampled_batch(one, [0], [made_of], [Score(0.0)]))
    assert batch.token_ids.tolist() == [100, 100, 2147483647, 16777217]


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("leads", [[0, 1, 2, 3], [0, 2], [3]])
def test_rows_of_all_engines_are_spread_over_all_ranks(leads: list[int]) -> None:
    positions, trajectories = make_trajectories(3)
    values = [score(t) for t in trajectories]

    def body(
        group: ThreadGroup,
    ) -> tuple[TrainBatch, list[tuple[int, list[int], list[float], float]], dict[str, float]]:
        """With N engines, each has every N-th prompt. Only the leading rank of an engine has responses."""
        mine: list[int] = []
        if group.rank() in leads:
            engine = leads.index(group.rank())
            mine = [k for k, place in enumerate(positions) if place % len(leads) == engine]
        parts = [Score(values[k].value, {"all": 1.0, **({"first": 2.0} if k == 0 else {})}) for k in mine]
        drawn = [positions[k] for k in mine], [trajectories[k] for k in mine], parts
        batch, facts = RowExchange(SAMPLES)(sampled_batch(PROMPTS, *drawn))
        return batch, rows_of(batch), facts.part_means

    ranks = run_ranks(4, body)
    ((alone, rows, _),) = run_ranks(1, lambda _: (b := call(positions, trajectories), rows_of(b), None))
    assert alone.rows.tolist() == list(range(24))
    tokens = [len(batch.token_ids) for batch, _, _ in ranks]
    assert sum(tokens) == len(alone.token_ids) and max(tokens) - min(tokens) <= 2 * int(alone.lengths.max())
    assert sorted(row for batch, _, _ in ranks for row in batch.rows.tolist()) == list(range(24))
    for batch, found, means in ranks:
        assert found == rows and means == {"all": 1.0, "first": 2.0}
        for name in ("lengths", "num_sampled", "scores", "truncated", "group_ids"):
            assert torch.equal(getattr(batch, name), getattr(alone, name))


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_versions_of_tokens_do_not_depend_on_who_owns_them(world_size: int) -> None:
    """Every third response was begun with the policy before, and a turn of the environment is of no policy."""
    positions, trajectories = make_trajectories(3)
    expected = []
    for k, one in enumerate(trajectories):
        prompt_length, length = len(one.prompt.prompt_ids), len(one.token_ids)
        later = min(prompt_length + 2, length)
        if k % 3 == 0:
            one.versions = ((prompt_length, 4), (later, 5))
        one.loss_mask[-1] = k % 2 == 0
        versions = [0] * prompt_length + [4 if k % 3 == 0 and t < later else 5 for t in range(prompt_length, length)]
        if k % 3:
            one.versions = ((prompt_length, 5),)
        expected.append([*versions[:-1], versions[-1] * (k % 2 == 0)])

    def body(group: ThreadGroup) -> tuple[list[list[int]], Tensor | None]:
        mine = [k for k, place in enumerate(positions) if place % world_size == group.rank()]
        drawn, scores = [trajectories[k] for k in mine], [score(trajectories[k]) for k in mine]
        places = [positions[k] for k in mine]
        batch, _ = RowExchange(SAMPLES, asynchronous=True)(sampled_batch(PROMPTS, places, drawn, scores))
        assert batch.versions is not None and batch.versions.dtype == torch.int32
        whole = pad_rows(batch, batch.versions)
        rows = [whole[row, :length].tolist() for row, length in enumerate(batch.lengths.tolist())]
        synchronous, _ = RowExchange(SAMPLES)(sampled_batch(PROMPTS, places, drawn, scores))
        return rows, synchronous.versions

    for found, without in run_ranks(world_size, body):
        assert found == expected and without is None


@pytest.mark.parametrize("fault", ["missing", "doubled", "replaced", "foreign"])
def test_fault_25_a_lost_or_doubled_trajectory_is_an_error(fault: str) -> None:
    positions, trajectories = make_trajectories()
    if fault == "missing":
        positions, trajectories = positions[:-1], trajectories[:-1]
    elif fault == "doubled":
        positions, trajectories = [*positions, positions[4]], [*trajectories, trajectories[4]]
    elif fault == "replaced":  # the number is right
        positions[5], trajectories[5] = positions[4], trajectories[4]
    else:
        positions[5] = 99
    named = {
        "missing": "none for prompt 'p7', sample 2",
        "doubled": "2 for prompt 'p1', sample 1",
        "replaced": "none for prompt 'p1', sample 2; 2 for prompt 'p1', sample 1",
        "foreign": "none for prompt 'p1', sample 2",
    }
    with pytest.raises(
        LostTrajectory, match=r"returned 2[345] trajectories, 24 different ones were asked for"
    ) as raised:
        call(positions, trajectories)
    assert named[fault] in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_an_error(value: float) -> None:
    positions, trajectories = make_trajectories()
    scores = [score(t) for t in trajectories]
    scores[7].value = value
    with expect_error(RuntimeError, value="rows [7]"):
        RowExchange(SAMPLES)(sampled_batch(PROMPTS, positions, trajectories, scores))


def test_what_an_engine_must_not_give_is_refused() -> None:
    with expect_error(ValueError, field=("prompt 'p3'", "sample 1"), value=("1 logprobs", "2 response tokens")):
        single_turn(prompt(3), 1, [5, 6], [-1.0], "", "stop", 0)
    with expect_error(ValueError, field=("prompt 'p3'", "sample 0"), value="no tokens"):
        single_turn(prompt(3, length=0), 0, [5], [-1.0], "", "stop", 0)


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("world_size", [1, 3])
def test_fault_24_a_prompt_with_a_response_without_a_score_leaves_the_step(world_size: int) -> None:
    """On every rank, the batch equals a step of the other prompts alone."""
    positions, trajectories = make_trajectories(7)
    failed = {3: "timeout", 4: "error", 18: "error"}  # in prompts 1, 1 and 6

    def body(group: ThreadGroup) -> tuple[TrainBatch, ScoreFacts, list[Any]]:
        mine = [k for k in range(24) if k % group.size() == group.rank()]
        scores = [replace(score(trajectories[k]), failure=failed.get(k), cause=f"cause {k}") for k in mine]
        given = [positions[k] for k in mine], [trajectories[k] for k in mine], scores
        batch, facts = RowExchange(SAMPLES, on_error=OnError(drop=True))(sampled_batch(PROMPTS, *given))
        return batch, facts, rows_of(batch)

    left = [k for k in range(24) if positions[k] not in (1, 6)]
    fewer = [place for place in range(8) if place not in (1, 6)]
    alone = (
        [PROMPTS[place] for place in fewer],
        [fewer.index(positions[k]) for k in left],
        [trajectories[k] for k in left],
        [score(trajectories[k]) for k in left],
    )
    (expected,) = run_ranks(1, lambda _: rows_of(RowExchange(SAMPLES)(sampled_batch(*alone))[0]))
    for batch, facts, rows in run_ranks(world_size, body):
        assert rows == expected and len(rows) == 18
        assert batch.prompts is not None and [p.index for p in batch.prompts] == fewer
        assert (facts.failures, facts.num_dropped) == ({"error": 2, "timeout": 1}, 2)


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize(
    ("on_error", "message"),
    [
        (
            OnError(max_share=0.1),
            r"3 of 25 responses got no score, more than reward\.max_error_share=0\.1; the first: cause",
        ),
        (
            OnError(drop=True),
            r"each of the 8 prompts .* reward\.on_error=drop leaves nothing to learn from; the first: cause",
        ),
    ],
)
def test_the_share_of_failures_is_that_of_all_ranks(on_error: OnError, message: str) -> None:
    """No rank has more than a tenth of its own, or all of its prompts; the first has one dropped response."""
    positions, trajectories = make_trajectories()
    failing = range(3) if not on_error.drop else range(0, 24, SAMPLES)

    def body(group: ThreadGroup) -> str:
        mine = [k for k in range(24) if k % 3 == group.rank()]
        scores = [Score(0.0, failure="error" if k in failing else None, cause=f"cause {k}") for k in mine]
        given = [positions[k] for k in mine], [trajectories[k] for k in mine], scores
        with pytest.raises(ConfigError, match=message) as error:
            RowExchange(SAMPLES, on_error=on_error)(sampled_batch(PROMPTS, *given, [Score(0.0)] * (group.rank() == 0)))
        return str(error.value)

    assert len(set(run_ranks(3, body))) == 1  # one message


def test_what_has_no_score_counts_as_zero_by_default() -> None:
    positions, trajectories = make_trajectories()
    scores = [replace(score(t), value=0.0, failure="error") for t in trajectories]
    batch, facts = RowExchange(SAMPLES)(sampled_batch(PROMPTS, positions, trajectories, scores))
    assert batch.num_rows == 24 and facts.failures == {"error": 24, "timeout": 0}


@pytest.mark.usefixtures("rank_threads")
def test_parts_of_scores_arrive_by_row_on_every_rank() -> None:
    positions, trajectories = make_trajectories()
    scores = [Score(0.0, {"a": float(k), "b": -float(k)} if k else {"a": 0.5}) for k in range(len(trajectories))]
    exchange = RowExchange(SAMPLES, parts=("b", "a"))
    expected = [[0.0, 0.5], *([-float(k), float(k)] for k in range(1, 24))]

    def of_rank(group: ThreadGroup) -> list[list[float]] | None:
        """The first rank has no responses. The others have theirs in reverse order."""
        mine = [k for k in reversed(range(24)) if group.rank() == 1 + k % 2]
        batch, _ = exchange(
            sampled_batch(
                PROMPTS, [positions[k] for k in mine], [trajectories[k] for k in mine], [scores[k] for k in mine]
            )
        )
        return None if batch.score_parts is None else batch.score_parts.tolist()

    assert run_ranks(3, of_rank) == [expected] * 3
    (without,) = run_ranks(1, lambda _: call(positions, trajectories).score_parts)
    assert without is None


def test_a_part_that_no_score_has_is_refused_with_those_there_are() -> None:
    positions, trajectories = make_trajectories()
    scores = [Score(0.0, {"boxed": 1.0, "format": 0.0}) for _ in trajectories]
    with expect_error(ConfigError, field="algorithm.reward_weights", value="'boxd'", remedy=("boxed", "format")):
        RowExchange(SAMPLES, parts=("boxed", "boxd"))(sampled_batch(PROMPTS, positions, trajectories, scores))


GREEDY = {place: Score(place / 8 - 0.3) for place in range(len(PROMPTS))}


@pytest.mark.usefixtures("rank_threads")
def test_scores_of_greedy_responses_are_known_for_every_row_on_every_rank() -> None:
    positions, trajectories = make_trajectories()
    exchange = RowExchange(SAMPLES, baselines=True)

    def of_rank(group: ThreadGroup) -> tuple[list[float], float]:
        """The first rank has no responses. The others have every other prompt."""
        places = [place for place in reversed(range(8)) if group.rank() == 1 + place % 2]
        mine = [k for k, place in enumerate(positions) if place in places]
        scores = [score(trajectories[k]) for k in mine]
        greedy = {place: GREEDY[place] for place in places}
        batch, facts = exchange(
            sampled_batch(PROMPTS, [positions[k] for k in mine], [trajectories[k] for k in mine], scores, (), greedy)
        )
        assert batch.baselines is not None
        return batch.baselines.tolist(), rollout_metrics(batch, facts)["reward/baseline_mean"]

    expected = [place / 8 - 0.3 for place in range(8) for _ in range(SAMPLES)]
    assert run_ranks(3, of_rank) == [(expected, pytest.approx(3.5 / 8 - 0.3))] * 3


def test_metrics_of_samples_do_not_count_greedy_responses() -> None:
    positions, trajectories = make_trajectories()
    scores = [score(t) for t in trajectories]
    with_greedy = RowExchange(SAMPLES, baselines=True)(
        sampled_batch(PROMPTS, positions, trajectories, scores, (), GREEDY)
    )
    metrics = rollout_metrics(*with_greedy)
    del metrics["reward/baseline_mean"]
    assert metrics == rollout_metrics(*RowExchange(SAMPLES)(sampled_batch(PROMPTS, positions, trajectories, scores)))


def test_a_greedy_response_that_is_missing_or_has_no_finite_score_ends_the_step() -> None:
    positions, trajectories = make_trajectories()
    exchange, scores = RowExchange(SAMPLES, baselines=True), [score(t) for t in trajectories]
    with pytest.raises(LostTrajectory, match="7 greedy responses for 8 prompts"):
        exchange(
            sampled_batch(PROMPTS, positions, trajectories, scores, (), {place: GREEDY[place] for place in range(7)})
        )
    with expect_error(RuntimeError, field="prompt 'p2'"):
        exchange(sampled_batch(PROMPTS, positions, trajectories, scores, (), GREEDY | {2: Score(float("nan"))}))


def test_a_prompt_whose_greedy_response_has_no_score_can_leave_the_step() -> None:
    positions, trajectories = make_trajectories()
    scores, greedy = [score(t) for t in trajectories], GREEDY | {2: Score(0.0, failure="timeout", cause="late")}
    exchange = RowExchange(SAMPLES, on_error=OnError(drop=True), baselines=True)
    batch, facts = exchange(sampled_batch(PROMPTS, positions, trajectories, scores, (), greedy))
    assert facts.num_dropped == 1 and facts.failures == {"error": 0, "timeout": 1}
    assert batch.baselines is not None and batch.prompts is not None
    assert [p.index for p in batch.prompts] == [0, 1, 3, 4, 5, 6, 7]
    assert batch.baselines[::SAMPLES].tolist() == [GREEDY[place].value for place in (0, 1, 3, 4, 5, 6, 7)]
    with expect_error(ConfigError, field="reward.max_error_share", value="0.03", remedy="raise reward.max_error_share"):
        RowExchange(SAMPLES, on_error=OnError(max_share=0.03), baselines=True)(
            sampled_batch(PROMPTS, positions, trajectories, scores, (), greedy)
        )
