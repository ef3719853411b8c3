"""Move the weights of a real model to host memory and back, and copy an actor's weights into a reference bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import TrainerConfig
from rlhf_mcore.data.collate import RowTokens, make_microbatches
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.platform import current_platform
from rlhf_mcore.residency.ledger import WEIGHTS
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Reference
from tests.distributed.models import make
from tests.rows import Row, batch_of
from tests.unit.mcore.test_model import build, groups

__all__ = ["groups"]

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]


@pytest.fixture
def model(tmp_path: Path, groups: ModelGroups) -> MegatronModel:
    make("qwen3_tied", tmp_path)
    return build(tmp_path, groups, trainable=False)


def logprobs(model: MegatronModel) -> Tensor:
    held = RowTokens([0], [7], {"token_ids": torch.arange(1, 8, dtype=torch.int32)})
    parts = make_microbatches(held, max_tokens=9, packing=True)
    (found,) = model.forward(parts, lambda logits, part: model.logprobs_and_entropy(logits, part, 1.0)[0])
    return found


def weights(model: MegatronModel) -> dict[str, Tensor]:
    return {p.name: p.tensor.clone() for p in model.local_parameters()}


def is_released(model: MegatronModel) -> bool:
    tensors = [tensor for chunk in model.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    return all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


def move(model: MegatronModel, *, by_layer: bool = False) -> None:
    model.share(DeviceSharing(current_platform()), "reference", (WEIGHTS,), by_layer=by_layer)


@pytest.mark.parametrize("by_layer", [False, True])
def test_weights_come_back_bit_by_bit_as_often_as_they_are_asked_for(model: MegatronModel, by_layer: bool) -> None:
    before, said = weights(model), logprobs(model)
    move(model, by_layer=by_layer)
    assert is_released(model)
    for _ in range(2):
        with model.movable.use(WEIGHTS):
            found = weights(model)
            assert found.keys() == before.keys()
            assert all(torch.equal(found[name], before[name]) for name in before)
        assert is_released(model)
        assert torch.equal(logprobs(model), said)  # loads them onto the device while the model runs
        assert is_released(model)


def test_weights_are_released_when_the_block_fails(model: MegatronModel) -> None:
    move(model)
    with pytest.raises(KeyError), model.movable.use(WEIGHTS):
        raise KeyError
    assert is_released(model)


def test_what_a_use_that_writes_leaves_is_what_comes_back(model: MegatronModel) -> None:
    move(model)
    with model.movable.use(WEIGHTS, writes=True):
        for parameter in model.local_parameters():
            parameter.tensor.mul_(1.5)
        changed = weights(model)
    with model.movable.use(WEIGHTS):
        assert all(torch.equal(tensor, changed[name]) for name, tensor in weights(model).items())


def test_what_any_other_use_writes_is_lost(model: MegatronModel) -> None:
    before = weights(model)
    move(model)
    with model.movable.use(WEIGHTS):
        for parameter in model.local_parameters():
            parameter.tensor.zero_()
    with model.movable.use(WEIGHTS):
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())


@pytest.mark.parametrize(("offload", "by_layer"), [(False, False), (True, False), (True, True)])
def test_a_refreshed_reference_equals_the_actor_bit_by_bit(
    model: MegatronModel, tmp_path: Path, groups: ModelGroups, offload: bool, by_layer: bool
) -> None:
    make("qwen3_tied", tmp_path / "actor", seed=1)
    actor = build(tmp_path / "actor", groups, trainable=True)
    wanted, said = weights(actor), logprobs(actor)
    if offload:
        move(model, by_layer=by_layer)
    placed = RoleModel(groups.layout, model, model.spec, TrainerConfig())
    trained: Any = SimpleNamespace(model=SimpleNamespace(model=actor))
    Reference(placed, 1.0).refresh(trained)
    assert is_released(model) == offload
    with model.movable.use(WEIGHTS):
        found = weights(model)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(logprobs(model), said)
    # The actor changes afterwards. The reference has separate weights.
    for parameter in actor.local_parameters():
        parameter.tensor.zero_()
    with model.movable.use(WEIGHTS):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(model).items())


def test_microbatches_that_are_filled_up_to_one_size_give_the_same_logprobs(
    model: MegatronModel, groups: ModelGroups
) -> None:
    """Overlapped communication of tensor-parallel ranks needs microbatches of equal size."""
    rows = [Row([1, 2, 3], [4 + k] * k, [0.0] * k) for k in (5, 9, 2, 7)]
    placed = RoleModel(groups.layout, model, model.spec, TrainerConfig(max_tokens_per_microbatch=32))
    seen: list[tuple[int, ...]] = []
    model.chunks[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    plain = Reference(placed, 1.0).compute_logprobs(batch_of(rows, [0] * 4))
    model.overrides = Overrides(values={"tp_comm_overlap": True})
    filled = Reference(placed, 1.0).compute_logprobs(batch_of(rows, [0] * 4))
    assert seen == [(1, 35), (1, 32), (1, 32)]
    assert plain.count_nonzero() == 23
    torch.testing.assert_close(filled, plain, rtol=0, atol=1e-5)  # products of other shapes
