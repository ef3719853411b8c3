"""Test learning-rate schedules, and torch.distributed as Megatron sees it while it builds an optimizer."""

from __future__ import annotations

import math
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import OptimizerConfig, ScheduleConfig
from rlhf_mcore.mcore.optimizer import aligned_within, check_state_dtype, learning_rate
from rlhf_mcore.platform import current_platform
from tests.unit.parallel.world import Meeting, ThreadGroup


def rates(count: int, **settings: object) -> list[float]:
    cfg = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate(update, 8.0, cfg) for update in range(count)]


def test_constant() -> None:
    assert rates(3) == [8.0, 8.0, 8.0]
    assert rates(6, warmup=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_ends_at_the_minimum_with_the_last_update_and_stays_there() -> None:
    assert rates(7, name="linear", total_updates=5) == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0, 0.0]
    assert rates(6, name="linear", total_updates=5, min_lr=4.0) == [8.0, 7.0, 6.0, 5.0, 4.0, 4.0]


def test_linear_after_warm_up() -> None:
    assert rates(7, name="linear", warmup=2, total_updates=7) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]


def test_cosine() -> None:
    half = 4.0 * (1 + math.sqrt(0.5)), 4.0 * (1 - math.sqrt(0.5))
    assert rates(6, name="cosine", total_updates=5) == pytest.approx([8.0, half[0], 4.0, half[1], 0.0, 0.0])
    found = rates(5, name="cosine", warmup=2, total_updates=5, min_lr=2.0)
    assert found == pytest.approx([4.0, 8.0, 8.0, 5.0, 2.0])


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_runs_that_end_in_or_right_after_the_warm_up(name: str) -> None:
    assert rates(1, name=name, total_updates=1) == [8.0]
    assert rates(2, name=name, warmup=2, total_updates=2) == [4.0, 8.0]
    assert rates(3, name=name, warmup=2, total_updates=3) == [4.0, 8.0, 8.0]


def test_bf16_state_without_transformer_engine_is_rejected() -> None:
    check_state_dtype(OptimizerConfig(), "critic.optimizer")
    with pytest.raises(
        ConfigError, match=r"critic\.optimizer\.state_dtype=bf16 needs .* Transformer Engine .* set it to fp32"
    ):
        check_state_dtype(OptimizerConfig(state_dtype="bf16"), "critic.optimizer")


def test_only_megatrons_optimizer_module_sees_other_collectives_and_only_in_the_block() -> None:
    """torch.distributed belongs to the whole process. Another thread, and vLLM in this process, see it unchanged."""
    group: Any = ThreadGroup(Meeting(3), 0)
    original, before = (dist.all_gather_object, dist.get_world_size), megatron_optimizer.torch
    seen: list[Any] = []

    def look() -> None:
        seen.append((torch.distributed.all_gather_object, torch.distributed.get_world_size))

    with pytest.raises(KeyError), aligned_within(group):
        thread = Thread(target=look)
        thread.start()
        thread.join()
        assert megatron_optimizer.torch.distributed.get_world_size() == 3
        assert megatron_optimizer.torch.distributed.all_gather_object is not original[0]
        assert megatron_optimizer.torch.distributed.all_reduce is before.distributed.all_reduce
        assert megatron_optimizer.torch.nn is torch.nn
        raise KeyError
    assert seen == [original]
    assert megatron_optimizer.torch is before
    assert (dist.all_gather_object, dist.get_world_size) == original


def test_without_fused_kernels_the_norm_of_gradients_is_megatrons_bit_for_bit() -> None:
    """Megatron's own norm reads one number per tensor from the device.

    It makes tensors on CUDA, which ``prepare_megatron`` redirects.
    """
    current_platform().prepare_megatron()
    generator = torch.Generator().manual_seed(0)
    flag = torch.zeros(1, dtype=torch.int)
    for count in (1, 2, 7, 40):
        lists = [[torch.randn(37 * number + 1, generator=generator) * 10.0 ** (number % 5) for number in range(count)]]
        expected, _ = local_multi_tensor_l2_norm(65536, flag, lists, False)
        found, _ = clip_grads.l2_norm_impl(65536, flag, lists, False)
        assert torch.equal(found, expected) and found.shape == (1,)
    exact, _ = clip_grads.l2_norm_impl(65536, flag, [[torch.tensor([3.0]), torch.tensor([0.0, 4.0])]], False)
    assert exact.tolist() == [5.0]


def test_the_norm_of_gradients_asks_the_device_for_nothing() -> None:
    """Reading a number of a meta tensor would fail."""
    current_platform().prepare_megatron()
    found, _ = clip_grads.l2_norm_impl(
        65536, None, [[torch.ones(3, device="meta"), torch.ones(4, device="meta")]], False
    )
    assert found.is_meta and found.shape == (1,)
