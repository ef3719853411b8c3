"""Fine-tuning and reward models over a table of logits or scores. The oracles go row by row in double precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import OptimizerConfig, TrainerConfig
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles.policy import SupervisedActor
from rlhf_mcore.roles.scalar_models import RewardModelTrainer
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.types import TrainBatch
from tests.rows import pad_rows, padded_batch
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.roles import lookup
from tests.unit.roles.lookup import Lookup

pytestmark = pytest.mark.usefixtures("world")

CENTERING = 0.1
CUTS = [(8, True), (16, True), (64, True), (16, False), (64, False)]


@pytest.fixture
def scorer() -> Lookup:
    return Lookup(width=1)


def build_model(model: Any, name: str, max_tokens: int, packing: bool, prompts: int = 3) -> TrainedModel:
    trainer, plan = TrainerConfig(max_tokens_per_microbatch=max_tokens, packing=packing), MinibatchPlan(prompts)
    cfg = OptimizerConfig(lr=0.5)
    return TrainedModel(model.layout, model, model.spec, trainer, optimizer=cfg, plan=plan, name=name)


def reward_model(model: Lookup, max_tokens: int = 64, packing: bool = True) -> RewardModelTrainer:
    return RewardModelTrainer(build_model(model, "reward_model", max_tokens, packing), CENTERING)


def pair_oracle(table: Tensor, made: TrainBatch) -> dict[str, Tensor]:
    last = [
        ids[length - 1]
        for ids, length in zip(padded_batch(made).token_ids.tolist(), made.lengths.tolist(), strict=True)
    ]
    scores = [table[token, 0] for token in last]
    pairs = list(zip(scores[::2], scores[1::2], strict=True))
    losses = [torch.log1p(torch.exp(r - c)) + CENTERING * (c + r) ** 2 for c, r in pairs]
    right = [0.5 if c == r else float(c > r) for c, r in pairs]
    return {
        "loss": sum(losses, torch.zeros(())) / len(pairs),
        "accuracy": torch.tensor(sum(right) / len(pairs)),
        "margin": sum(((c - r) for c, r in pairs), torch.zeros(())) / len(pairs),
        "score_mean": sum(scores, torch.zeros(())) / len(scores),
    }


@pytest.mark.parametrize(("max_tokens", "packing"), [(16, True), (64, True), (16, False), (64, False)])
def test_pairs_make_the_gradient_of_the_equation_however_they_are_cut(
    scorer: Lookup, max_tokens: int, packing: bool
) -> None:
    made = lookup.batch()
    metrics = reward_model(scorer, max_tokens, packing).deliver_update(made)().metrics
    table = scorer.table.detach().double().requires_grad_()
    expected = pair_oracle(table, made)
    expected["loss"].backward()
    assert scorer.table.grad is not None and table.grad is not None
    torch.testing.assert_close(scorer.table.grad.double(), table.grad, rtol=1e-5, atol=1e-7)
    assert metrics == {
        "loss/reward_model": pytest.approx(expected["loss"].item(), rel=1e-5),
        "reward_model/accuracy": pytest.approx(expected["accuracy"].item()),
        "reward_model/margin": pytest.approx(expected["margin"].item(), rel=1e-4, abs=1e-6),
        "reward_model/score_mean": pytest.approx(expected["score_mean"].item(), rel=1e-4, abs=1e-6),
        "reward_model/grad_norm": pytest.approx(float(table.grad.norm()), rel=1e-5),
        "reward_model/lr": 0.5,
        "reward_model/skipped_updates": 0.0,
        "reward_model/bad_updates_in_a_row": 0.0,
    }
    cut = next(call for call in scorer.calls if isinstance(call, list))
    assert all(rows % 2 == 0 for rows in cut) and sum(cut) == 6, "pairs stay together"
    assert (len(cut) > 1) == (max_tokens == 16), "the small budget has to cut"


@pytest.mark.usefixtures("rank_threads")
def test_shares_of_the_ranks_add_up_and_hold_whole_pairs(scorer: Lookup) -> None:
    def body(group: ThreadGroup) -> tuple[Tensor, list[Any]]:
        mine = Lookup(width=1, layout=ParallelLayout(group.size()))
        reward_model(mine).deliver_update(lookup.batch())()
        assert mine.table.grad is not None
        return mine.table.grad, [call for call in mine.calls if isinstance(call, list)]

    ranks = run_ranks(4, body)  # one of them has no pair
    ((alone, _),) = run_ranks(1, body)
    torch.testing.assert_close(sum(grad for grad, _ in ranks), alone, rtol=1e-5, atol=1e-7)
    assert [calls for _, calls in ranks] == [[[2]], [[2]], [[2]], [[0]]]


def test_scores_are_those_at_the_last_token(scorer: Lookup) -> None:
    made = lookup.batch()
    last = padded_batch(made).token_ids.long().gather(1, made.lengths[:, None] - 1)[:, 0]
    assert reward_model(scorer).compute_scores(made).tolist() == scorer.table[last, 0].tolist()


@pytest.mark.parametrize(("max_tokens", "packing"), CUTS)
def test_fine_tuning_is_the_mean_over_response_tokens(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, packing: bool
) -> None:
    bigram = Lookup()
    made = lookup.batch(samples=1)
    which = SupervisedActor(build_model(bigram, "actor", max_tokens, packing, prompts=100))
    metrics = which.deliver_update(made)().metrics
    table = bigram.table.detach().double().requires_grad_()
    whole = padded_batch(made)
    at = [(row, t) for row in range(6) for t in whole.loss_mask[row].nonzero().flatten().tolist()]
    tokens = whole.token_ids.tolist()
    losses = [-table[tokens[row][t - 1]].log_softmax(-1)[tokens[row][t]] for row, t in at]
    loss = sum(losses, torch.zeros(())) / len(at)
    loss.backward()
    assert bigram.table.grad is not None and table.grad is not None
    torch.testing.assert_close(bigram.table.grad.double(), table.grad, rtol=1e-4, atol=1e-6)
    assert metrics["loss/sft"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["actor/perplexity"] == pytest.approx(math.exp(loss.item()), rel=1e-5)
    logprobs = which.compute_logprobs(made)
    by_row = pad_rows(made, logprobs)
    assert [by_row[row, t].item() for row, t in at] == pytest.approx([-value.item() for value in losses], abs=1e-5)
    assert not logprobs[~made.loss_mask].any()
