"""Train a policy on pairs over a table of logits. The oracles compute row by row in double precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from rlhf_mcore.config.schema import DpoConfig
from rlhf_mcore.data.examples import TokenizedExample, example_batch
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles.policy import Reference
from rlhf_mcore.roles.preference import PreferenceActor
from rlhf_mcore.trainer.example_learner import add_reference
from tests.episodes import make_example
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.roles.lookup import Lookup
from tests.unit.roles.test_supervised import build_model

pytestmark = pytest.mark.usefixtures("world")

PAIRS = [
    make_example([1, 2], [3, 4, 0], [5, 0]),
    make_example([6], [0], [1, 1, 2, 3, 0]),  # the chosen response contains only its end token
    make_example([2, 3, 4], [5, 6, 0], [5, 6, 0]),  # both are equal
]
BETA = 0.5
CUTS = [(16, True), (64, True), (16, False), (64, False)]


def other(like: Lookup) -> Lookup:
    """Return a second model like ``like`` with other and larger logits. Tokens that it does not expect are improbable."""
    frozen = Lookup(layout=like.layout)
    frozen.table.data = 2 * frozen.table.data.roll(1, 0)
    return frozen


def actor(
    model: Any, max_tokens: int = 64, packing: bool = True, cfg: DpoConfig | None = None, frozen: Any = None
) -> PreferenceActor:
    reference = Reference(
        build_model(other(model) if frozen is None else frozen, "reference", max_tokens, packing), 1.0
    )
    return PreferenceActor(build_model(model, "actor", max_tokens, packing), cfg or DpoConfig(beta=BETA), reference)


def response_logprob(table: Tensor, prompt: Any, response: Any) -> Tensor:
    before = [prompt[-1], *response[:-1]]
    return torch.stack([table[b].log_softmax(-1)[t] for b, t in zip(before, response, strict=True)]).sum()


def oracle(table: Tensor, frozen: Tensor, pairs: list[TokenizedExample]) -> dict[str, Tensor]:
    rewards = [
        [
            BETA * (response_logprob(table, p.prompt_ids, r) - response_logprob(frozen, p.prompt_ids, r))
            for r in p.response_ids
        ]
        for p in pairs
    ]
    chosen, rejected = torch.stack([torch.stack(pair) for pair in rewards]).unbind(1)
    right = (chosen > rejected).double() + 0.5 * (chosen == rejected)
    return {
        "loss": softplus(rejected - chosen).mean(),
        "accuracy": right.mean(),
        "margin": (chosen - rejected).mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
    }


@pytest.mark.parametrize(("max_tokens", "packing"), CUTS)
def test_pairs_make_the_gradient_of_the_equation_however_they_are_cut(max_tokens: int, packing: bool) -> None:
    bigram = Lookup()
    which, batch = actor(bigram, max_tokens, packing), example_batch(PAIRS)
    which.compute_reference(batch)
    metrics = which.deliver_update(batch)().metrics
    table = bigram.table.detach().double().requires_grad_()
    expected = oracle(table, other(bigram).table.detach().double(), PAIRS)
    expected["loss"].backward()
    assert bigram.table.grad is not None and table.grad is not None
    torch.testing.assert_close(bigram.table.grad.double(), table.grad, rtol=1e-4, atol=1e-6)
    assert metrics["loss/dpo"] == pytest.approx(expected.pop("loss").item(), rel=1e-5)
    assert {name: metrics[f"preference/{name}"] for name in expected} == {
        name: pytest.approx(value.item(), rel=1e-4, abs=1e-6) for name, value in expected.items()
    }
    cut = next(call for call in bigram.calls if isinstance(call, list))
    assert all(rows % 2 == 0 for rows in cut) and sum(cut) == 6, "pairs stay together"


def test_logprobs_of_a_reference_that_are_known_before_give_the_same_update() -> None:
    made, found = [], []
    for knows in (False, True):
        bigram, pairs = Lookup(), [replace(pair) for pair in PAIRS]
        which = actor(bigram, 16)
        if knows:
            assert which.reference is not None
            add_reference(pairs, which.reference, examples_per_batch=2)
            which.reference = None
        found.append(which.measure(example_batch(pairs)))
        batch = example_batch(pairs)
        if not knows:
            which.compute_reference(batch)
        made.append(which.deliver_update(batch)().metrics)
        found.append({"gradient": float(bigram.table.grad.square().sum())})  # type: ignore[union-attr]
    assert made[1] == {name: pytest.approx(value, rel=1e-5, abs=1e-6) for name, value in made[0].items()}
    assert found[2:] == [{n: pytest.approx(v, rel=1e-5) for n, v in each.items()} for each in found[:2]]


def test_what_is_held_out_is_measured_alike() -> None:
    bigram = Lookup()
    found = actor(bigram, 16).measure(example_batch(PAIRS))
    expected = oracle(bigram.table.detach().double(), other(bigram).table.detach().double(), PAIRS)
    assert found.pop("pairs") == 3
    assert found == {name: pytest.approx(3 * value.item(), rel=1e-5, abs=1e-6) for name, value in expected.items()}


@pytest.mark.usefixtures("rank_threads")
def test_shares_of_the_ranks_add_up_and_hold_whole_pairs() -> None:
    def body(group: ThreadGroup) -> tuple[Tensor, list[Any], dict[str, float]]:
        mine = Lookup(layout=ParallelLayout(group.size()))
        which, batch = actor(mine, cfg=DpoConfig(loss="kto", beta=BETA)), example_batch(PAIRS, with_mismatched=True)
        which.compute_reference(batch)
        result = which.deliver_update(batch)()
        assert mine.table.grad is not None and result is not None
        return mine.table.grad, [call for call in mine.calls if isinstance(call, list)], dict(result.metrics)

    ranks = run_ranks(4, body)  # one rank has no pair
    ((alone, _, metrics),) = run_ranks(1, body)
    torch.testing.assert_close(sum(grad for grad, *_ in ranks), alone, rtol=1e-5, atol=1e-7)
    assert sorted(str(calls) for _, calls, _ in ranks) == ["[[0]]", "[[2]]", "[[2]]", "[[2]]"]
    assert metrics["preference/divergence"] > 0
    for *_, shown in ranks:
        assert shown["preference/divergence"] == pytest.approx(metrics["preference/divergence"])


def test_mismatched_rows_are_prompts_with_the_responses_to_the_one_before() -> None:
    made = example_batch(PAIRS, with_mismatched=True).mismatched
    assert made is not None
    rows = [row.tolist() for row in made.token_ids.split(made.lengths.tolist())]
    # The longest row of the step has six tokens. Longer rows are cut.
    assert rows == [
        [1, 2, 5, 6, 0],
        [1, 2, 5, 6, 0],
        [6, 3, 4, 0],
        [6, 5, 0],
        [2, 3, 4, 0],
        [2, 3, 4, 1, 1, 2],
    ]
    assert made.num_sampled.tolist() == [3, 3, 3, 2, 1, 3]


def test_without_a_reference_the_update_reads_none() -> None:
    bigram = Lookup()
    which = PreferenceActor(build_model(bigram, "actor", 64, True), DpoConfig(loss="simpo", beta=2.0))
    metrics = which.deliver_update(example_batch(PAIRS))().metrics
    means = [
        [2 * response_logprob(bigram.table.detach(), p.prompt_ids, r).item() / len(r) for r in p.response_ids]
        for p in PAIRS
    ]
    assert metrics["preference/chosen_reward"] == pytest.approx(sum(chosen for chosen, _ in means) / 3, rel=1e-5)
    assert metrics["preference/rejected_reward"] == pytest.approx(sum(rejected for _, rejected in means) / 3, rel=1e-5)
    assert "preference/divergence" not in metrics


def test_an_infinite_reference_makes_a_bad_update_that_is_skipped() -> None:
    bigram, frozen = Lookup(), Lookup()
    frozen.table.data[:] = torch.nan
    which, batch = actor(bigram, frozen=frozen), example_batch(PAIRS)
    which.compute_reference(batch)
    result = which.deliver_update(batch)()
    assert result.metrics["actor/skipped_updates"] == 1 and result.bad_in_a_row == 1
    assert not any(call[0] == "step" for call in bigram.calls if isinstance(call, tuple))
