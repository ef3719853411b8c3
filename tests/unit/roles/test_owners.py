"""The rank that stores a row: it is one of the ranks that learn from it, and no result depends on it."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig, OptimizerConfig, TrainerConfig
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles.policy import Actor, Reference
from rlhf_mcore.roles.scalar_models import Critic
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.batches import SampledBatch
from rlhf_mcore.trainer.exchange import RowExchange, spread_owners
from rlhf_mcore.trainer.reinforcement import PolicyLearner, Roles
from rlhf_mcore.types import Prompt, RowSizes, Score
from tests.episodes import sampled_batch, single_turn
from tests.rows import pad_rows
from tests.unit.parallel.world import Meeting, ThreadGroup, run_ranks
from tests.unit.roles.lookup import VOCAB, Lookup, descend
from tools.row_movement import Setup, count_step

PPO_LAYOUTS = {"dp3": ParallelLayout(3), "tp2 dp2": ParallelLayout(4, tp=2), "apart": ParallelLayout(2, first_rank=1)}
PROMPTS = [Prompt(str(k), k, [k % VOCAB] * (1 + k % 3), "") for k in range(6)]


@pytest.mark.parametrize("updates", [1, 4])
def test_tokens_of_grpo_move_once(updates: int) -> None:
    counter, _ = count_step(Setup("GRPO", ParallelLayout(2), updates=updates), num_prompts=8)
    assert counter.token_sends == 1 and phases(counter.sent) == {"exchange"}


def test_rows_move_only_within_a_replica() -> None:
    counter, tokens = count_step(Setup("GRPO", ParallelLayout(8, tp=2, pp=2)), num_prompts=8)
    for phase in ("reference", "update"):
        assert counter.sent[phase, "token_ids"] == 3 * 4 * tokens, "three other ranks, and int32"
        assert counter.sent[phase, "values"] == pytest.approx(0.75 * 4 * tokens, rel=0.1), "to three owners of four"


def test_ranks_of_a_replica_own_nearly_equal_tokens() -> None:
    lengths = torch.tensor([9, 1, 5, 5, 3, 7, 2, 8, 6, 4, 9, 1])
    layout, spec = ParallelLayout(8, tp=2, pp=2, first_rank=1), Lookup().spec
    plan = MinibatchPlan(3)
    model = TrainedModel(layout, None, spec, TrainerConfig(), optimizer=OptimizerConfig(), plan=plan, name="actor")
    owners, replicas = model.choose_owners(RowSizes(lengths, torch.arange(12) // 2))
    assert replicas == ((1, 2, 5, 6), (3, 4, 7, 8))
    owned = {rank: int(lengths[owners == rank].sum()) for ranks in replicas for rank in ranks}
    assert sum(owned.values()) == 60 and max(owned.values()) - min(owned.values()) <= 5
    by_update = [
        [int(lengths[part][torch.isin(owners[part], torch.tensor(ranks))].sum()) for ranks in replicas]
        for part in (slice(0, 6), slice(6, 12))
    ]
    assert by_update == [[15, 15], [15, 15]]


@pytest.mark.parametrize(
    ("critic", "moving"),
    [(ParallelLayout(2), {"exchange"}), (ParallelLayout(2, tp=2), {"exchange", "values", "update"})],
)
def test_tokens_of_ppo_move_to_a_critic_of_another_layout(critic: ParallelLayout, moving: set[str]) -> None:
    counter, _ = count_step(Setup("PPO", ParallelLayout(2), critic, updates=4), num_prompts=8)
    assert counter.token_sends == len(moving) and phases(counter.sent) == moving


def phases(sent: dict[tuple[str, str], int]) -> set[str]:
    return {phase for (phase, _), count in sent.items() if count}


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("prompts_per_minibatch", [2, 6])
@pytest.mark.parametrize("name", PPO_LAYOUTS)
def test_no_bit_of_a_step_depends_on_the_owners(name: str, prompts_per_minibatch: int) -> None:
    layout = PPO_LAYOUTS[name]
    owned, spread = (run_step(layout, prompts_per_minibatch, owned=owned) for owned in (True, False))
    assert owned.keys() == spread.keys() and {"loss/policy", "loss/value", "kl/mean", "actor weights"} < owned.keys()
    for key, value in owned.items():
        assert np.array_equal(value, spread[key]), key


def run_step(layout: ParallelLayout, prompts_per_minibatch: int, *, owned: bool) -> dict[str, Any]:
    """Run a step of PPO whose critic runs on all ranks. Return its metrics, weights, logprobs, values and advantages."""
    cfg, world_size = AlgorithmConfig(advantage="gae", kl=KLConfig(coef=0.1)), max(layout.ranks) + 1
    plan, limits = MinibatchPlan(prompts_per_minibatch, 2), TrainerConfig(max_tokens_per_microbatch=16)
    apart = [Meeting(layout.dp) for _ in range(layout.tp)]

    def body(group: ThreadGroup) -> dict[str, Any]:
        def build_model(own: ParallelLayout, width: int, role: str) -> TrainedModel:
            model: Any = None
            if group.rank() in own.ranks:
                place = own.coordinates(group.rank())
                peers = ThreadGroup(apart[place["tp"]], place["dp"]) if own is layout else None
                model = Lookup(width, own, peers, place["tp"], rule=descend)
            spec, cfg = Lookup().spec, OptimizerConfig(lr=0.5)
            return TrainedModel(own, model, spec, limits, optimizer=cfg, plan=plan, name=role)

        actor = Actor(build_model(layout, VOCAB, "actor"), 1.0, cfg)
        critic = Critic(build_model(ParallelLayout(world_size), 1, "critic"), 0.2)
        reference = Reference(build_model(layout, VOCAB, "reference"), 1.0)
        owners = actor.model.choose_owners if owned else spread_owners
        batch = RowExchange(2, choose_owners=owners)(rollouts_of(group))[0]
        recorder: Any = SimpleNamespace(phase=lambda name: nullcontext())
        learner = PolicyLearner(Roles(actor, critic, reference), AdvantageComputer(cfg), recorder)
        results, found = learner.learn(1, batch)
        found = dict(found) | {name: value for result in results for name, value in result.metrics.items()}
        for name in ("old_logprobs", "ref_logprobs", "old_values", "advantages", "returns"):
            found[name] = pad_rows(batch, getattr(batch, name)).numpy()
        weights = actor.model.model
        return found if weights is None else found | {"actor weights": weights.table.detach().numpy()}

    return run_ranks(world_size, body)[layout.first_rank]


def rollouts_of(group: ThreadGroup) -> SampledBatch:
    """Return the rollouts of a rank: each rank has sampled every n-th prompt, twice."""
    draw = random.Random(0)
    places, sampled, scores = [], [], []
    for place, of in enumerate(PROMPTS):
        for sample in range(2):
            ids = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
            logprobs = [-2 * draw.random() for _ in ids]
            if place % group.size() == group.rank():
                places.append(place)
                sampled.append(single_turn(of, sample, ids, logprobs, "", "stop", 0))
                scores.append(Score(float((place + sample) % 3)))
    return sampled_batch(PROMPTS, places, sampled, scores)
