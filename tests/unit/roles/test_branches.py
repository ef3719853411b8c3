"""Train on branched episodes as one row. Weight and place in the group do not depend on the number of branches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import AlgorithmConfig, RolloutCorrectionConfig
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.environments.agents.tree import TokenTree, cut_turn, join_sequences
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.metrics import rollout_metrics
from rlhf_mcore.types import ROUTES, Completion, Score, Trajectory
from tests.episodes import sampled_batch
from tests.rows import rows_of_padded
from tests.unit.pairs import pairwise
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.roles.lookup import Lookup
from tests.unit.roles.test_turns import PROMPT, SCORES, WRITTEN, actor, completion, expected_gradient, make_episode

pytestmark = pytest.mark.usefixtures("world", "rank_threads")
AGGREGATIONS = {
    "token": AlgorithmConfig(loss_aggregation="token"),
    "sequence": AlgorithmConfig(loss_aggregation="sequence"),
    "constant": AlgorithmConfig(loss_aggregation="constant", constant_length=9, normalize_std=False),
    "rloo": AlgorithmConfig(advantage="rloo", loss_aggregation="constant", constant_length=9),
    "opo": AlgorithmConfig(advantage="opo"),
    "reinforce": AlgorithmConfig(advantage="reinforce", gamma=0.9),
    "reinforce_plus_plus_baseline": AlgorithmConfig(advantage="reinforce_plus_plus_baseline"),
    "turns": AlgorithmConfig(turn_credit=True, turn_gamma=0.5),
    "correction": AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(mode="sequence", cap=1.5)),
    "geometric": AlgorithmConfig(
        rollout_correction=RolloutCorrectionConfig(mode="geometric", mask_low=0.1, mask_high=9)
    ),
}


def fork_episode(sample: int) -> Trajectory:
    """Return the episode of ``test_turns`` from a harness that restarts for the second turn: two sequences with the same tokens."""
    first, answer, second = WRITTEN[sample]
    one = episode(PROMPT, sample, [completion(first, 3, "stop")], "text")
    told = [np.array(first, np.int32), np.array(answer, np.int32), completion(second, 4, "length")]
    return join_sequences([one, episode(PROMPT, sample, told, "text")])


def learn(
    world_size: int, algorithm: AlgorithmConfig, packing: bool, draw: Any
) -> list[tuple[Tensor, list[list[float]]]]:
    """Return the gradient of each rank and the advantages of each row."""

    def body(group: ThreadGroup) -> tuple[Tensor, list[list[float]]]:
        mine = [sample for sample in range(2) if sample % world_size == group.rank()]
        batch, _ = RowExchange(2)(
            sampled_batch([PROMPT], [0] * len(mine), [draw(k) for k in mine], [Score(SCORES[k]) for k in mine])
        )
        model = Lookup(layout=ParallelLayout(world_size))
        which = actor(model, algorithm, packing)
        batch.old_logprobs = which.compute_logprobs(batch)
        AdvantageComputer(algorithm)(batch)
        assert batch.advantages is not None
        which.deliver_update(batch)()
        assert model.table.grad is not None
        return model.table.grad, rows_of_padded(batch, batch.advantages)

    return run_ranks(world_size, body)


@pairwise(
    ("world_size", [1, 3]),
    ("packing", [True, False]),
    ("name", list(AGGREGATIONS)),
)
def test_the_gradient_of_a_forked_episode_is_that_of_the_same_tokens_unforked(
    name: str, packing: bool, world_size: int
) -> None:
    algorithm = AGGREGATIONS[name]
    plain = learn(world_size, algorithm, packing, make_episode)
    branched = learn(world_size, algorithm, packing, lambda k: fork_episode(k) if k == 0 else make_episode(k))
    gradients = [torch.stack([grad for grad, _ in ranks]).sum(0) for ranks in (plain, branched)]
    assert gradients[0].abs().max() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-7)
    for (_, left), (_, right) in zip(plain, branched, strict=True):
        assert [pytest.approx(row, abs=1e-6) for row in left] == right
    if name == "token":
        torch.testing.assert_close(gradients[1].double(), expected_gradient(), rtol=1e-4, atol=1e-6)


def tree(sample: int) -> Trajectory:
    """Return a token tree. The first sample has three branches: two tries of the second turn, and another agent."""
    first, answer, second = WRITTEN[sample]
    nodes = TokenTree()
    root = nodes.add(None, "", PROMPT.prompt_ids, completion(first, 3, "stop"), "")
    nodes.add(root, "", answer, completion(second, 4, "length"), "")
    if sample == 0:
        nodes.add(root, "", answer, completion([6, 6], 4, "length"), "")
        nodes.add(None, "", [5, 5, 5], completion([1, 2], 4, "stop"), "")
    return nodes.trajectory(PROMPT, sample)


def test_a_group_counts_its_episodes_and_every_token_once() -> None:
    """GRPO at ratio 1 computes advantages from two rewards, for any number of rows. The weight covers all tokens, 9 and 3."""
    [(gradient, advantages)] = learn(1, AGGREGATIONS["token"], True, tree)
    half = 0.5**0.5
    assert advantages == [pytest.approx([half] * 9, abs=3e-6), pytest.approx([-half] * 3, abs=3e-6)]
    table = Lookup().table.detach().double().requires_grad_()
    log_p = table.log_softmax(-1)
    steps = [(2, 3), (3, 2), (6, 3), (3, 1), (1, 3), (6, 6), (6, 6), (5, 1), (1, 2)]
    total = -sum(half * log_p[pair] for pair in steps) + sum(half * log_p[pair] for pair in [(2, 1), (6, 2), (2, 2)])
    (total / 12).backward()
    assert table.grad is not None
    torch.testing.assert_close(gradient.double(), table.grad, rtol=1e-4, atol=1e-6)


def test_the_rows_of_a_step_know_their_branches() -> None:
    def body(group: ThreadGroup) -> tuple[Any, dict[str, float], Tensor]:
        batch, facts = RowExchange(2)(sampled_batch([PROMPT], [0, 0], [tree(0), tree(1)], [Score(1.0), Score(0.0)]))
        run = actor(Lookup(), AGGREGATIONS["token"], True).model
        last = run.per_row(batch, lambda logits, part: part.token_ids.float())
        return batch, rollout_metrics(batch, facts), last

    [(batch, metrics, last)] = run_ranks(1, body)
    assert batch.sequences == {0: (10, 9, 5)} and batch.lengths.tolist() == [24, 7]
    assert metrics["rollout/branches_mean"] == 2 and metrics["rollout/branches_max"] == 3
    assert metrics["rollout/num_tokens"] == 12 and metrics["reward/mean"] == 0.5
    assert last.tolist() == [2.0, 2.0]  # outputs for a whole row are at the end of its last branch


def test_ratios_of_whole_rows_need_a_pass_of_their_own_where_a_row_has_branches() -> None:
    def exchange_rows(draw: Any) -> Any:
        scores = [Score(1.0), Score(0.0)]
        return run_ranks(
            1, lambda group: RowExchange(2)(sampled_batch([PROMPT], [0, 0], [draw(0), draw(1)], scores))[0]
        )[0]

    batch, plain = exchange_rows(tree), exchange_rows(make_episode)
    needs = {
        name: AdvantageComputer(AGGREGATIONS[name]).needs_old_logprobs(batch)
        for name in ("token", "correction", "geometric")
    }
    assert needs == {"token": False, "correction": True, "geometric": True}
    assert not AdvantageComputer(AGGREGATIONS["correction"]).needs_old_logprobs(plain)


def test_tokens_that_a_branch_repeats_have_the_routes_of_the_turn_that_ends_it() -> None:
    """A turn records the routes of all previous tokens, so branches need no new routes."""

    def turn(ids: list[int], before: int, own: int) -> Completion:
        routes = np.full((before + len(ids), 1, 1), own, np.int16)
        routes[0] = 0
        return replace(completion(ids, 4, "stop"), fields={ROUTES: routes})

    nodes = TokenTree()
    root = nodes.add(None, "", [1, 2], turn([3, 4], 2, 7), "")
    nodes.add(root, "", [5], turn([6], 5, 8), "")
    nodes.add(root, "", [6, 6], turn([1, 2], 6, 9), "")
    made = nodes.trajectory(PROMPT, 0)
    routes = made.fields[ROUTES]
    assert isinstance(routes, np.ndarray) and made.sequences == (6, 8)
    assert routes[:6, 0, 0].tolist() == [0, 7, 7, 7, 8, 8]
    assert routes[6:, 0, 0].tolist() == [0, 9, 9, 9, 9, 9, 9, 9]


@pytest.mark.parametrize("before", [0, 2])
def test_a_turn_that_is_cut_keeps_what_was_recorded_before_it(before: int) -> None:
    routes = np.arange(before + 3, dtype=np.int16)
    cut = cut_turn(replace(completion([3, 4, 6], 3, "stop"), fields={ROUTES: routes}), 2)
    assert cut.token_ids.tolist() == [3, 4] and cut.fields[ROUTES].tolist() == routes[:-1].tolist()
