"""Step optimizer state in host memory, on a device that copies late, and compare it with torch's AdamW and the plain optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from torch import Tensor

from rlhf_mcore.config.schema import OptimizerConfig
from rlhf_mcore.mcore.groups import ModelGroups, build_groups
from rlhf_mcore.mcore.host_state import HostRange, HostSteps, choose_hosted, move_to_host
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import DTYPES, current_platform
from rlhf_mcore.residency.ledger import KINDS, OPTIMIZER
from rlhf_mcore.residency.sharing import DeviceSharing
from tests.distributed.models import make
from tests.late_device import LateCuda
from tests.unit.mcore.test_model import build

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]
STEPS, LR, DECAY = 20, 1e-2, 0.1


@pytest.fixture(scope="module")
def groups(world: None) -> ModelGroups:
    made = build_groups(ParallelLayout(1))
    assert made is not None
    return made


def test_whole_ranges_are_hosted_large_ones_first() -> None:
    assert choose_hosted([5, 40, 5, 30, 20], 0.5) == {1, 0, 2}
    assert choose_hosted([5, 40, 5, 30, 20], 0.55) == {1, 0, 2}, "at most the share"
    assert choose_hosted([1, 1, 1], 1.0) == {0, 1, 2}
    assert choose_hosted([3, 2], 0.0) == choose_hosted([], 1.0) == set()


@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "fp32 bf16"])
@pytest.mark.parametrize("bucket", [7, 20, 1000])
def test_host_steps_are_those_of_adamw_while_copies_are_late(dtypes: str, bucket: int, late_cuda: LateCuda) -> None:
    """Buckets of 7 split ranges and use each slot several times. Weights before a wait, and grads before a copy, are NaN."""
    chance = torch.Generator().manual_seed(0)
    kinds = [DTYPES[name] for name in dtypes.split()]
    start = [
        torch.randn(size, generator=chance).to(kind) for size, kind in zip((3, 16, 1, 11), kinds * 4, strict=False)
    ]
    reference = [torch.nn.Parameter(weights.float()) for weights in start]
    adamw = torch.optim.AdamW([{"params": reference[:2]}, {"params": reference[2:], "weight_decay": 0.0}], LR)
    settings = [
        {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay} for decay in (0.01, 0.01, 0.0, 0.0)
    ]
    hosted = []
    for weights, group in zip(start, settings, strict=True):
        is_half = weights.dtype != torch.float32
        stepped = weights.float() if is_half else weights
        hosted.append(HostRange(weights, stepped, group, move_to_host(weights, stepped)))
        assert stepped.untyped_storage().nbytes() == (0 if is_half else weights.nbytes)
    steps = HostSteps(hosted, current_platform(), bucket)
    slot = (6 if dtypes == "bf16" else 12) * min(bucket, 31)
    assert late_cuda.pinned_bytes == min(2, -(-31 // bucket)) * slot, "only the slots are pinned"
    for _ in range(5):
        for one, parameter in zip(hosted, reference, strict=True):
            one.stepped.grad = torch.randn(one.stepped.shape, generator=chance)
            parameter.grad = one.stepped.grad.clone()
        steps.step()
        adamw.step()
        for one, parameter in zip(hosted, reference, strict=True):
            assert one.stepped.grad is None
            torch.testing.assert_close(one.state.get("master", one.weights), parameter.detach())
            torch.testing.assert_close(one.weights, parameter.detach().to(one.weights.dtype))
            torch.testing.assert_close(one.state["exp_avg"], adamw.state[parameter]["exp_avg"])
            torch.testing.assert_close(one.state["exp_avg_sq"], adamw.state[parameter]["exp_avg_sq"])
    assert late_cuda.num_late > 0 and hosted[0].state["step"] == 5


def trainable(path: Path, groups: ModelGroups, share: float, dtype: str) -> MegatronModel:
    model = build(path, groups, trainable=True, dtype=dtype)
    model.add_optimizer(OptimizerConfig(lr=LR, weight_decay=DECAY, clip_grad=0.5, offload=share))
    return model


def steps_of(model: MegatronModel, count: int, seed: int = 0) -> list[float]:
    """Make updates with random gradients, as after a backward pass. Return the norms."""
    chance, norms = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        with model.updating():
            for buffer in model.chunks[0].buffers:
                buffer.grad_data.copy_(0.1 * torch.randn(buffer.grad_data.shape, generator=chance))
            norms.append(model.step(lr=LR).grad_norm)
    return norms


def state_of(model: MegatronModel) -> dict[str, Tensor]:
    """Return weights and state by name and kind, as a checkpoint contains them."""
    assert model.optimizer is not None
    state = {f"{one.name} {kind}": t for one in model.optimizer.shards() for kind, t in one.tensors.items()}
    return {
        key: tensor.clone() for key, tensor in (state | {p.name: p.tensor for p in model.local_parameters()}).items()
    }


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[key].float() - expected[key].float()).abs().max()) for key in expected)


@pytest.mark.parametrize(("dtype", "share"), [("fp32", 0.5), ("bf16", 0.5), ("bf16", 1.0)])
def test_twenty_updates_equal_those_of_the_plain_optimizer(
    dtype: str, share: float, tmp_path: Path, groups: ModelGroups, late_cuda: LateCuda
) -> None:
    """Clipping, and weight decay of matrices only. Each update of an element may round differently in its last bits."""
    make("qwen3_tied", tmp_path)
    plain, hosted = trainable(tmp_path, groups, 0.0, dtype), trainable(tmp_path, groups, share, dtype)
    before = late_cuda.num_late
    assert steps_of(plain, STEPS) == steps_of(hosted, STEPS), "the norm is computed on the device"
    assert late_cuda.num_late > before
    expected, found = state_of(plain), state_of(hosted)
    weights = {p.name for p in plain.local_parameters()} if dtype == "bf16" else set()
    exact = [{key: t for key, t in state.items() if key not in weights} for state in (found, expected)]
    assert largest_difference(*exact) < STEPS * LR * 2**-20
    # bf16 weights are rounded masters: a different last bit of a master may round it the other way
    assert hosted.optimizer is not None and hosted.optimizer.unrounded_masters() == []
    assert hosted.optimizer.scalars() == plain.optimizer.scalars() == {"step": STEPS, "loss_scale": None}  # type: ignore[union-attr]
    assert hosted.optimizer.is_finite()
    held = sum(tensor.numel() for tensor in plain.optimizer.device_state())  # type: ignore[union-attr]
    left = sum(tensor.numel() for tensor in hosted.optimizer.device_state())
    assert left == pytest.approx((1 - share) * held, abs=0.01 * held)


def test_masters_are_created_while_there_are_no_gradients(
    tmp_path: Path, groups: ModelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("qwen3", tmp_path)
    model = build(tmp_path, groups, trainable=True, dtype="bf16")
    (buffer,) = model.chunks[0].buffers
    whole, create, sizes = buffer.grad_data.untyped_storage().nbytes(), megatron_optimizer.get_megatron_optimizer, []

    def create_now(*args: Any, **named: Any) -> Any:
        sizes.append(buffer.grad_data.untyped_storage().nbytes())
        return create(*args, **named)

    monkeypatch.setattr(megatron_optimizer, "get_megatron_optimizer", create_now)
    model.add_optimizer(OptimizerConfig(offload=1.0))
    assert sizes == [0] and buffer.grad_data.untyped_storage().nbytes() == whole


def test_a_nan_in_a_gradient_steps_nothing_on_the_host(tmp_path: Path, groups: ModelGroups) -> None:
    make("qwen3", tmp_path)
    model = trainable(tmp_path, groups, 1.0, "bf16")
    before = state_of(model)
    model.chunks[0].buffers[0].grad_data.fill_(float("nan"))
    assert not model.step(lr=LR).updated
    assert largest_difference(state_of(model), before) == 0 and model.optimizer.scalars()["step"] == 0  # type: ignore[union-attr]


def test_parts_that_leave_the_device_exclude_hosted_state(
    tmp_path: Path, groups: ModelGroups, late_cuda: LateCuda
) -> None:
    make("qwen3_tied", tmp_path)
    expected = trainable(tmp_path, groups, 0.5, "bf16")
    steps_of(expected, 3)
    model = trainable(tmp_path, groups, 0.5, "bf16")
    assert model.optimizer is not None
    on_device = sum(tensor.nbytes for tensor in model.optimizer.device_state())
    whole = sum(tensor.nbytes for shard in model.optimizer.shards() for tensor in shard.tensors.values())
    sharing = DeviceSharing(model.platform)
    model.share(sharing, "actor", KINDS)
    assert model.movable.parts[OPTIMIZER].num_bytes == on_device < 0.51 * whole
    steps_of(model, 3)
    sharing.settle()
    assert not model.movable.parts[OPTIMIZER].is_resident
    found = {f"{one.name} {kind}": t.clone() for one in model.optimizer.shards() for kind, t in one.tensors.items()}
    assert largest_difference(found, {key: t for key, t in state_of(expected).items() if key in found}) == 0
