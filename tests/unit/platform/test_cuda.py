"""Test the functions of the CUDA platform that need no device."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher

from rlhf_mcore import machine
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.platform import Platform, cuda
from rlhf_mcore.platform.cpu import CpuPlatform
from rlhf_mcore.platform.cuda import CudaPlatform
from rlhf_mcore.platform.megatron_versions import PERMUTE_WAITS
from rlhf_mcore.rewards.pool import default_workers
from tests.messages import expect_error
from tests.sysfs import make_sysfs


@pytest.fixture(autouse=True)
def own_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore Megatron's permutation after a test."""
    monkeypatch.setattr(token_dispatcher, "permute", moe_utils.permute)


@pytest.mark.parametrize("platform", [CudaPlatform(), CpuPlatform()])
def test_routers_work_without_transformer_engine(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_utils, "HAVE_TE", False)
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)  # as Megatron-core 0.16 imports it
    platform.prepare_megatron()
    tokens = torch.tensor([[1.0, 2.0], [3.0, -1.0]], requires_grad=True)
    weight = torch.tensor([[2.0, 0.5], [-1.0, 1.0], [0.0, 3.0]], requires_grad=True)
    logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    assert logits.tolist() == [[3.0, 1.0, 6.0], [5.5, -4.0, -3.0]]
    logits.sum().backward()
    assert tokens.grad is not None and tokens.grad.tolist() == [[1.0, 4.5]] * 2  # sums over the weight's columns
    assert weight.grad is not None and weight.grad.tolist() == [[4.0, 1.0]] * 3  # sums over tokens


def test_a_product_of_transformer_engine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "te_general_gemm", fused := object(), raising=False)
    CudaPlatform().prepare_megatron()
    assert moe_utils.te_general_gemm is fused
    assert "te_general_gemm is not None" in inspect.getsource(moe_utils)


@pytest.mark.parametrize("with_probs", [True, False])
def test_tokens_are_sorted_by_experts_as_megatron_sorts_them(with_probs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are equal. Some experts get no token. Version 0.16 returns three values, and 0.19 five."""
    monkeypatch.setattr(moe_utils, "fused_permute", None, raising=False)
    CudaPlatform().prepare_megatron()
    assert (token_dispatcher.permute is not moe_utils.permute) == PERMUTE_WAITS
    draw = torch.Generator().manual_seed(0)
    routing = torch.zeros(50, 16, dtype=torch.bool)
    routing.scatter_(1, torch.rand(50, 13, generator=draw).topk(3).indices, True)
    results = []
    for permute in (moe_utils.permute, token_dispatcher.permute):
        tokens = torch.randn(50, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        probs = torch.rand(50, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
        rows, weights, order, *rest = permute(tokens, routing, probs=probs if with_probs else None, num_out_tokens=150)
        weighted = rows * weights[:, None] if with_probs else rows
        (weighted * torch.arange(150.0)[:, None]).sum().backward()
        results.append([rows, order, tokens.grad, *([weights, probs.grad] if with_probs else [])])
        assert len(rest) == (0 if PERMUTE_WAITS else 2), "the dispatcher unpacks as many"
    for expected, computed in zip(*results, strict=True):
        assert torch.equal(expected, computed)


def test_a_permutation_of_transformer_engine_or_of_a_number_on_the_device_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe_utils, "fused_permute", object(), raising=False)
    CudaPlatform().prepare_megatron()
    assert token_dispatcher.permute is moe_utils.permute
    monkeypatch.setattr(moe_utils, "fused_permute", None, raising=False)
    CudaPlatform().prepare_megatron()
    routing = torch.tensor([[True, False], [True, False], [False, False]])  # a dropped token
    rows, _, order, *_ = token_dispatcher.permute(torch.arange(3.0)[:, None], routing, num_out_tokens=torch.tensor(2))
    assert (rows.tolist(), order.tolist()) == ([[0.0], [1.0]], [0, 1])


VARIABLES = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


@pytest.fixture
def claimed_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Claim devices without environment variables. Returns the claimed devices."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that the test restores it
        monkeypatch.delenv(name)
    return devices


def test_deterministic_asks_every_library_before_the_device_is_used(claimed_devices: list[int]) -> None:
    platform = CudaPlatform()
    platform.setup_process(3, 1, deterministic=True)
    assert [os.environ[name] for name in VARIABLES] == ["0", ":4096:8", "^NVLS,NVLSTree"]
    assert (claimed_devices, platform.varying()) == ([3], "")
    assert not torch.are_deterministic_algorithms_enabled()
    with platform.megatron_region():
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert (
        not torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory is True
    )


def test_a_value_of_the_users_stays_and_one_that_leaves_the_order_open_is_told(
    claimed_devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    platform = CudaPlatform()
    platform.setup_process(0, 1, deterministic=True)
    assert [os.environ[name] for name in VARIABLES] == ["0", ":0:0", "Ring"]
    assert platform.varying() == (
        "CUBLAS_WORKSPACE_CONFIG=:0:0 does not fix the order of sums; unset it, or set it to :4096:8 or :16:8"
    )


def test_without_it_nothing_is_asked(claimed_devices: list[int]) -> None:
    platform = CudaPlatform()
    platform.setup_process(0, 1)
    assert not set(VARIABLES) & set(os.environ)
    with platform.megatron_region():
        assert not torch.are_deterministic_algorithms_enabled()


def test_a_process_runs_on_the_cores_of_the_numa_node_of_its_device(
    claimed_devices: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread runs there. The process's share of cores for reward workers stays the same."""
    sysfs = make_sysfs(tmp_path, {"0000:1b:00.0": 0, "0001:ca:00.0": 1, "0000:cb:00.0": -1}, {0: "0-3", 1: "4-7,12"})
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(machine, "_cores_before", None)
    monkeypatch.setattr(cuda, "numa_node", partial(machine.numa_node, sysfs=sysfs))
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    monkeypatch.setattr(CudaPlatform, "device", lambda self: torch.device("cuda", 2))

    def bind(domain: int, bus: int, allowed: Iterable[int]) -> set[frozenset[int]]:
        found = SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
        bound.clear()
        CudaPlatform().bind_to_node()
        return set(map(frozenset, bound.values()))

    assert bind(0, 0xCB, range(16)) == set()  # as virtual machines report it
    assert bind(0, 0x1B, range(8, 16)) == set()  # another program has bound it elsewhere
    assert bind(1, 0xCA, range(16)) == {frozenset({4, 5, 6, 7, 12})}
    assert {int(thread) for thread in os.listdir("/proc/self/task")} <= bound.keys()
    assert bind(1, 0xCA, {4, 5}) == {frozenset({4, 5})}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers() == 16 // 4
    (tmp_path / "devices/system/node/online").write_text("0\n")
    assert bind(1, 0xCA, range(16)) == set()


def test_a_process_without_a_device_of_its_own_is_refused(claimed_devices: list[int]) -> None:
    with expect_error(ConfigError, field="LOCAL_RANK", value=4, remedy="start at most 4"):
        CudaPlatform().setup_process(4, 1)
    assert claimed_devices == []


def test_what_goes_to_the_device_goes_in_one_copy_and_comes_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, bool]] = []

    class OnHost(CudaPlatform):
        def device(self) -> torch.device:
            return torch.device("cpu")

    empty, to = torch.empty, torch.Tensor.to

    def allocate_pinned(*sizes: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return empty(*sizes, dtype=dtype)

    def move(tensor: torch.Tensor, *args: Any, non_blocking: bool = False) -> torch.Tensor:
        copied.append((tensor.nbytes, non_blocking))
        return to(tensor, *args).clone()

    monkeypatch.setattr(torch, "empty", allocate_pinned)
    monkeypatch.setattr(torch.Tensor, "to", move)
    sent = [
        torch.tensor([[True, False, True]]),
        torch.arange(6).view(2, 3).t(),  # not contiguous
        torch.zeros(0, 2),
        torch.tensor(1.5, dtype=torch.float64),
        torch.tensor([1.0, -2.5], dtype=torch.bfloat16).expand(3, 2),
    ]
    found = OnHost().to_device(sent)
    assert copied == [(16 + 48 + 0 + 16 + 16, True)]
    for arrived, tensor in zip(found, sent, strict=True):
        assert arrived.dtype == tensor.dtype and arrived.tolist() == tensor.tolist()
    assert CudaPlatform.to_device is not CpuPlatform.to_device and CpuPlatform().to_device(sent)[1] is sent[1]
