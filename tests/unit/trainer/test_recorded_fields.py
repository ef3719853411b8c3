"""Fields that engines record of every token: to the owner of a row, through a checkpoint, to the loss that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_mcore.algorithms.interfaces import LossInputs, reads
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import AlgorithmConfig
from rlhf_mcore.data.episodes import decode_trajectories, encode_trajectories, episode
from rlhf_mcore.parallel.rows import move_rows, split_tokens
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.reinforcement import PolicyLearner, Roles
from rlhf_mcore.types import Completion, Prompt, Ragged, Score, TrainBatch, Trajectory
from tests.episodes import sampled_batch
from tests.messages import expect_error
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.roles import test_policy
from tests.unit.roles.lookup import Lookup
from tests.unit.trainer.records import prompt

PROMPTS = [prompt(index, length=1 + index) for index in range(4)]
LAYERS, EXPERTS = 3, 2


def completion(first: int, num_tokens: int, **others: Any) -> Completion:
    """Build a completion with each token's experts per layer. Token k has a picture of k patches."""
    tokens = np.arange(first, first + num_tokens, dtype=np.int32)
    routes = (tokens[:, None, None] + np.arange(LAYERS)[:, None] + 10 * np.arange(EXPERTS)).astype(np.uint8)
    counts = np.arange(num_tokens, dtype=np.int32)
    patches = np.arange(counts.sum() * 4, dtype=np.float32).reshape(-1, 4) + first
    fields = {"routes": routes, "patches": Ragged(counts, patches)} | others
    return Completion(0, tokens, np.full(num_tokens, -0.5, np.float32), ((0, 0),), "stop", fields=fields)


def two_turns(made_of: Prompt, sample: int = 0) -> Trajectory:
    """Two turns of the policy with an observation of two tokens between them."""
    first = completion(10 * made_of.index + sample, 1 + made_of.index % 3)
    return episode(made_of, sample, [first, np.array([7, 8], np.int32), completion(90, 2)], "text")


def same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    def flat(field: Any) -> list[Any]:
        return [np.asarray(part) for part in ((field.counts, field.values) if isinstance(field, Ragged) else (field,))]

    pairs = [pair for name in left for pair in zip(flat(left[name]), flat(right[name]), strict=True)]
    return left.keys() == right.keys() and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def test_tokens_that_the_policy_has_not_sampled_have_zeros_and_no_values() -> None:
    made = two_turns(PROMPTS[1])  # two tokens of a prompt, two of the policy, two of the environment, two of the policy
    routes, patches = made.fields["routes"], made.fields["patches"]
    assert isinstance(routes, np.ndarray) and isinstance(patches, Ragged)
    assert routes.shape == (8, LAYERS, EXPERTS) and routes.dtype == np.uint8
    assert routes[2].tolist() == [[10, 20], [11, 21], [12, 22]] and routes[7, 2].tolist() == [93, 103]
    assert not routes[~made.loss_mask].any()
    assert patches.counts.tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    assert patches.values.tolist() == [[10, 11, 12, 13], [90, 91, 92, 93]]


def test_a_turn_may_tell_of_all_tokens_before_it_and_fills_what_is_blank() -> None:
    """Routes cover two prompt tokens, two of the policy, two of the environment and one of the policy."""
    first, second = np.arange(1, 5, dtype=np.int16), np.arange(11, 18, dtype=np.int16)
    first[0] = second[0] = 0  # nothing predicts the first token
    turns = [
        replace(completion(5, 2), fields={"routes": first[:, None, None]}),
        np.array([7, 8], np.int32),
        replace(completion(9, 1), fields={"routes": second[:, None, None]}),
    ]
    made = episode(PROMPTS[1], 0, [*turns, np.array([3], np.int32)], "text")
    routes = made.fields["routes"]
    assert isinstance(routes, np.ndarray) and routes.dtype == np.int16
    assert routes[:, 0, 0].tolist() == [0, 2, 3, 4, 15, 16, 17, 0]


@pytest.mark.usefixtures("rank_threads")
def test_numbers_of_sixteen_bits_arrive() -> None:
    """Gloo sends none."""
    values = {"flat": torch.tensor([1, -2, 30000], dtype=torch.int16)}
    values["deep"] = values["flat"][:, None, None].expand(3, 2, 2).contiguous()

    def body(group: ThreadGroup) -> Any:
        rank = group.rank()
        held = {name: field[:1] if rank == 0 else field[1:] for name, field in values.items()}
        wanted = [np.array([1, 0]), np.array([], np.int64)]
        return move_rows(held, np.array([1, 2]), np.array([0, 1]), wanted)

    arrived, nothing = run_ranks(2, body)
    assert arrived["flat"].tolist() == [-2, 30000, 1] and arrived["deep"][:, 1, 1].tolist() == [-2, 30000, 1]
    assert arrived["deep"].dtype == torch.int16 and nothing["deep"].shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (replace(completion(5, 2), fields={}), r"the engine recorded the fields \['patches', 'routes'\], then \[\]"),
        (
            completion(5, 2, routes=np.zeros((3, LAYERS, EXPERTS), np.uint8)),
            "routes for 3 tokens, not for 2 response tokens",
        ),
    ],
)
def test_what_does_not_fit_the_tokens_is_named(turn: Completion, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        episode(PROMPTS[0], 0, [completion(1, 2), turn], "text")


@pytest.mark.usefixtures("rank_threads")
def test_fields_arrive_at_the_owners_of_rows() -> None:
    """The last rank has sampled nothing, but owns a row."""
    trajectories = [two_turns(each) for each in PROMPTS]

    def body(group: ThreadGroup) -> Any:
        rank = group.rank()
        mine = {0: [0, 1], 1: [2], 2: [3], 3: []}[rank]
        batch, _ = RowExchange(1)(
            sampled_batch(PROMPTS, mine, [trajectories[row] for row in mine], [Score(0.0)] * len(mine))
        )
        lengths = batch.lengths[batch.rows].tolist()
        routes, patches = batch.fields["routes"], batch.fields["patches"]
        assert isinstance(routes, Tensor) and isinstance(patches, Ragged)
        parts = zip(routes.split(lengths), split_tokens(patches, lengths), strict=True)
        return {
            row: dict(zip(("routes", "patches"), part, strict=True))
            for row, part in zip(batch.rows.tolist(), parts, strict=True)
        }

    owned = run_ranks(4, body)
    assert [len(rows) for rows in owned] == [1, 1, 1, 1]
    for rows in owned:
        for row, arrived in rows.items():
            assert same(trajectories[row].fields, arrived), row


@pytest.mark.usefixtures("rank_threads")
def test_rows_with_other_fields_end_the_step_on_every_rank() -> None:
    trajectories = [two_turns(each) for each in PROMPTS[:2]]
    trajectories[1] = replace(trajectories[1], fields={"routes": trajectories[1].fields["routes"]})

    def body(group: ThreadGroup) -> str:
        rank = group.rank()
        with pytest.raises(RuntimeError) as caught:
            RowExchange(1)(sampled_batch(PROMPTS[:2], [rank], [trajectories[rank]], [Score(0.0)]))
        return str(caught.value)

    assert all("different fields" in message and "patches" in message for message in run_ranks(2, body))


def test_a_checkpoint_holds_them() -> None:
    groups = {3: [two_turns(PROMPTS[1], 0), two_turns(PROMPTS[1], 1)], 0: [two_turns(PROMPTS[2])]}
    read = decode_trajectories(encode_trajectories(groups), {3: PROMPTS[1], 0: PROMPTS[2]})
    for number, group in groups.items():
        for before, after in zip(group, read[number], strict=True):
            assert same(before.fields, after.fields)
    damaged = encode_trajectories(groups).replace(rb"\"length\": 8", rb"\"length\": 7", 1)
    with pytest.raises(ValueError, match="counts 8 values for 25 tokens"):
        decode_trajectories(damaged, {3: PROMPTS[1], 0: PROMPTS[2]})


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("packing", [True, False])
def test_a_loss_gets_what_it_reads(packing: bool) -> None:
    """Every microbatch has, at the position that predicts a token, what belongs to the token: here its id, three times."""
    seen: list[bool] = []

    @reads("twins", "versions")
    def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        twins, versions = inputs.fields["twins"], inputs.fields["versions"]
        assert isinstance(twins, Tensor) and isinstance(versions, Tensor)
        assert twins.shape == (*inputs.mask.shape, 3) and twins.dtype == torch.uint8
        seen.append(torch.equal(twins[inputs.mask], versions[inputs.mask][:, None].expand(-1, 3).to(torch.uint8)))
        return (inputs.logprobs * inputs.weights).sum(), {}

    actor = test_policy.actor(Lookup(), AlgorithmConfig(), packing=packing)
    actor._policy_loss = loss
    batch = test_policy.batch()
    batch.versions = batch.token_ids.clone()
    with expect_error(
        ConfigError, field=("algorithm.policy_loss", "'twins'"), remedy=("another function", "configure the role")
    ):
        test_policy.update(actor, batch)
    batch.fields["twins"] = batch.token_ids.to(torch.uint8)[:, None].expand(-1, 3).contiguous()
    test_policy.update(actor, batch)
    assert seen and all(seen)


@pytest.mark.usefixtures("world")
def test_what_a_further_model_computes_is_there_before_anything_is_learned() -> None:
    batch, order = test_policy.batch(), list[str]()

    def compute(rows: TrainBatch) -> Tensor:
        order.append("teacher")
        return rows.rollout_logprobs + 1

    def old_logprobs(rows: TrainBatch) -> Tensor:
        order.append("actor")
        return rows.rollout_logprobs

    actor: Any = SimpleNamespace(compute_logprobs=old_logprobs, makes_one_update=lambda rows: False)
    recorder: Any = SimpleNamespace(phase=lambda name: nullcontext())
    learner = PolicyLearner(
        Roles(actor, computes={"teacher_logprobs": compute}), AdvantageComputer(AlgorithmConfig()), recorder
    )
    learner._compute(1, batch)
    assert order == ["teacher", "actor"]
    assert torch.equal(batch.field_of_tokens("teacher_logprobs"), batch.rollout_logprobs + 1)
