"""Follow an episode of two turns from the record to the gradient.

Policy tokens of both turns are trained on, environment tokens are not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import (
    AlgorithmConfig,
    OptimizerConfig,
    RolloutCorrectionConfig,
    ScheduleConfig,
    TrainerConfig,
)
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.types import Completion, Prompt, Score, Trajectory, Turn
from tests.episodes import sampled_batch
from tests.rows import rows_of_padded
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.roles.lookup import Lookup

PROMPT = Prompt("p", 0, [1, 2], "")
# For each sample: first text of the policy, answer of the environment, second text of the policy.
WRITTEN = [([3, 2], [4, 5, 6], [3, 1, 3]), ([1], [4, 6], [2, 2])]
SCORES = [1.0, 0.0]


def completion(ids: list[int], version: int, reason: str) -> Completion:
    logprobs = np.full(len(ids), -0.25 * version, np.float32)
    return Completion(0, np.array(ids, np.int32), logprobs, ((0, version),), reason)


def make_episode(sample: int) -> Trajectory:
    first, answer, second = WRITTEN[sample]
    parts = [completion(first, 3, "stop"), np.array(answer, np.int32), completion(second, 4, "length")]
    return episode(PROMPT, sample, parts, "text")


def test_the_record_tells_who_wrote_what_with_which_policy() -> None:
    one = make_episode(0)
    assert one.token_ids.tolist() == [1, 2, 3, 2, 4, 5, 6, 3, 1, 3] and one.token_ids.dtype == np.int32
    assert one.turns == (
        Turn("prompt", 0, 2),
        Turn("policy", 2, 4),
        Turn("environment", 4, 7),
        Turn("policy", 7, 10),
    )
    assert one.versions == ((2, 3), (7, 4)) and one.policy_version == 3
    assert one.sampled_ids.tolist() == [3, 2, 3, 1, 3] and one.num_sampled == 5
    assert one.logprobs.tolist() == [0, 0, -0.75, -0.75, 0, 0, 0, -1, -1, -1] and one.logprobs.dtype == np.float32
    assert one.finish_reason == "length" and one.is_truncated


@pytest.mark.usefixtures("world", "rank_threads")
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_turn_may_have_a_reward_of_its_own(world_size: int) -> None:
    """Without discount, a token gets the later rewards: in the first turn the score and the turn's reward, in the
    second turn the rest.
    """
    first, answer, second = WRITTEN[0]
    parts = [completion(first, 3, "stop"), np.array(answer, np.int32), completion(second, 4, "stop")]
    rewarded = episode(PROMPT, 0, parts, "text", rewards=[0.5, 0.0])
    assert [turn.reward for turn in rewarded.turns] == [0.0, 0.5, 0.0, 0.0]

    def body(group: ThreadGroup) -> tuple[list[list[float]], list[list[float]]]:
        drawn = [rewarded, make_episode(1)] if group.rank() == world_size - 1 else []
        batch, _ = RowExchange(2)(
            sampled_batch([PROMPT], [0] * len(drawn), drawn, [Score(2.0), Score(1.0)][: len(drawn)])
        )
        batch.old_logprobs = batch.rollout_logprobs
        AdvantageComputer(AlgorithmConfig(advantage="reinforce", gamma=1.0, whiten_advantages=False))(batch)
        assert batch.rewards is not None and batch.advantages is not None
        return rows_of_padded(batch, batch.rewards), rows_of_padded(batch, batch.advantages)

    for rewards, advantages in run_ranks(world_size, body):
        assert rewards == [[0, 0.5, 0, 0, 1.5], [0, 0, 1]]
        assert advantages == [[2, 2, 1.5, 1.5, 1.5], [1, 1, 1]]


def actor(model: Lookup, algorithm: AlgorithmConfig, packing: bool) -> Actor:
    which: Any = model
    limits = TrainerConfig(max_tokens_per_microbatch=16, packing=packing)
    plan = MinibatchPlan(1, 1, algorithm.loss_aggregation, algorithm.constant_length)
    optimizer = OptimizerConfig(lr=0.5, schedule=ScheduleConfig(warmup=2))
    trained = TrainedModel(model.layout, which, which.spec, limits, optimizer=optimizer, plan=plan, name="actor")
    return Actor(trained, 1.0, algorithm)


def expected_gradient(learned_turns: tuple[bool, bool] = (True, True)) -> Tensor:
    """Compute GRPO's policy gradient at ratio 1 token by token. The context of a token is the previous token."""
    table = Lookup().table.detach().double().requires_grad_()
    log_p = table.log_softmax(-1)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for (first, answer, second), advantage in zip(WRITTEN, (0.5**0.5, -(0.5**0.5)), strict=True):
        turns = zip([2, *first[:-1]], first, strict=True), zip([answer[-1], *second[:-1]], second, strict=True)
        for turn, learned in zip(turns, learned_turns, strict=True):
            total = total - sum(advantage * log_p[before, now] for before, now in turn if learned)
        count += len(first) + len(second)
    (total / count).backward()
    assert table.grad is not None
    return table.grad


@pytest.mark.usefixtures("world", "rank_threads")
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("packing", [True, False])
def test_both_turns_of_the_policy_learn_and_what_the_environment_wrote_does_not(world_size: int, packing: bool) -> None:
    algorithm = AlgorithmConfig(advantage="grpo", loss_aggregation="token")

    def body(group: ThreadGroup) -> tuple[Tensor, list[list[float]], Tensor]:
        mine = [sample for sample in range(2) if sample % world_size == group.rank()]
        drawn = [make_episode(sample) for sample in mine]
        batch, _ = RowExchange(2)(
            sampled_batch([PROMPT], [0] * len(mine), drawn, [Score(SCORES[sample]) for sample in mine])
        )
        assert batch.lengths.tolist() == [10, 7] and batch.num_sampled.tolist() == [5, 3]
        model = Lookup(layout=ParallelLayout(world_size))
        which = actor(model, algorithm, packing)
        batch.old_logprobs = which.compute_logprobs(batch)
        AdvantageComputer(algorithm)(batch)
        assert batch.advantages is not None
        outside = torch.cat([batch.old_logprobs, batch.advantages])[~batch.loss_mask.repeat(2)]
        which.deliver_update(batch)()
        assert model.table.grad is not None
        return model.table.grad, rows_of_padded(batch, batch.advantages), outside

    ranks = run_ranks(world_size, body)
    gradient = torch.stack([grad for grad, _, _ in ranks]).sum(0).double()
    torch.testing.assert_close(gradient, expected_gradient(), rtol=1e-4, atol=1e-6)
    # Tokens 4 and 5 only precede environment tokens, so the model learns no successor for them.
    assert gradient[[4, 5]].abs().max() == 0 and gradient[[1, 2, 3, 6]].abs().amax(1).min() > 1e-3
    for _, advantages, outside in ranks:
        assert advantages == [pytest.approx([0.5**0.5] * 5, abs=3e-6), pytest.approx([-(0.5**0.5)] * 3, abs=3e-6)]
        assert outside.abs().sum() == 0


@pytest.mark.usefixtures("world", "rank_threads")
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_turn_that_an_older_policy_wrote_may_be_left_out(world_size: int) -> None:
    """Version 3 wrote the first turns, and version 4 the second ones. Version 5 is trained. The counts stay."""
    correction = RolloutCorrectionConfig(mode="off", max_token_staleness=1)
    algorithm = AlgorithmConfig(advantage="grpo", loss_aggregation="token", rollout_correction=correction)

    def body(group: ThreadGroup) -> tuple[Tensor, dict[str, float]]:
        mine = [sample for sample in range(2) if sample % world_size == group.rank()]
        drawn, scores = [make_episode(sample) for sample in mine], [Score(SCORES[sample]) for sample in mine]
        batch, _ = RowExchange(2, asynchronous=True)(sampled_batch([PROMPT], [0] * len(mine), drawn, scores))
        batch.policy_version = 5
        model = Lookup(layout=ParallelLayout(world_size))
        which = actor(model, algorithm, packing=True)
        batch.old_logprobs = which.compute_logprobs(batch)
        metrics = AdvantageComputer(algorithm)(batch)
        which.deliver_update(batch)()
        assert model.table.grad is not None
        return model.table.grad, metrics

    ranks = run_ranks(world_size, body)
    gradient = torch.stack([grad for grad, _ in ranks]).sum(0).double()
    torch.testing.assert_close(gradient, expected_gradient((False, True)), rtol=1e-4, atol=1e-6)
    for _, metrics in ranks:  # 3 of 8 tokens are two versions old, the others one
        assert metrics["rollout/staleness_mean"] == 11 / 8 and metrics["rollout/staleness_max"] == 2
        assert metrics["rollout/stale_fraction"] == 3 / 8 and metrics["rollout/effective_sample_size"] == 5 / 8
