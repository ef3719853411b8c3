"""Test the redirection layer: it is narrow, temporary, and undone after use."""

from __future__ import annotations

import inspect
import os
import re
import sys
from types import ModuleType

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher

# Megatron modules that the package loads are redirected.
import rlhf_mcore.mcore.model
import rlhf_mcore.mcore.optimizer
from rlhf_mcore.platform import cpu, current_platform, eager_imports, megatron_versions
from rlhf_mcore.platform.cpu import CpuPlatform
from rlhf_mcore.platform.megatron_versions import VERSION

ON_CPU = not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not ON_CPU, reason="the CPU platform is for machines without a GPU")


@pytest.fixture(scope="module", autouse=True)
def prepared_megatron() -> None:
    CpuPlatform().prepare_megatron()


@pytest.fixture(scope="module")
def modules() -> list[ModuleType]:
    """Return the loaded modules of Megatron-core that use torch."""
    found = [module for name, module in sys.modules.items() if name.startswith("megatron.core")]
    # Skip a package that contains a module of the same name, such as dist_checkpointing.strategies.
    return [m for m in found if hasattr(getattr(m, "torch", None), "nn") and getattr(m, "__file__", None)]


@pytest.fixture(scope="module")
def sources(modules: list[ModuleType]) -> str:
    texts = []
    for module in modules:
        assert module.__file__ is not None
        with open(module.__file__, encoding="utf-8") as file:
            texts.append(file.read())
    return "\n".join(texts)


def calls(name: str, sources: str) -> list[str]:
    """Return every call of ``torch.<name>``, from its name to the closing bracket."""
    found = []
    for match in re.finditer(rf"\btorch\.{name}\(", sources):
        depth, end = 1, match.end()
        while depth and end < len(sources):
            depth += {"(": 1, ")": -1}.get(sources[end], 0)
            end += 1
        found.append(sources[match.start() : end])
    return found


def test_functions_that_are_imported_eagerly_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x

    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    decorator = torch.compile
    with eager_imports():
        assert torch.compile(plain) is plain and torch.compile(dynamic=True)(plain) is plain
    assert "TORCHDYNAMO_DISABLE" not in os.environ and torch.compile is decorator
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # the user's own value stays
    with eager_imports():
        assert os.environ["TORCHDYNAMO_DISABLE"] == "0"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


def test_this_machine_is_the_cpu_platform() -> None:
    platform = current_platform()
    assert isinstance(platform, CpuPlatform)
    assert (platform.name, platform.collective_backend, platform.default_dtype) == ("cpu", "gloo", "fp32")
    assert (platform.dtype("auto"), platform.dtype("bf16")) == ("fp32", "bf16")
    assert platform.device() == torch.device("cpu")


# ------------------------------------------------------------------------------------------------ nothing but what is needed
@pytest.mark.parametrize("name", sorted(cpu._cuda_names()))
def test_a_redirected_cuda_name_is_used_by_megatron(name: str, sources: str) -> None:
    assert re.search(rf"\btorch\.cuda\.{name}\b", sources), f"Megatron no longer uses torch.cuda.{name}: take it out"


@pytest.mark.parametrize("name", cpu._FACTORIES)
def test_a_redirected_factory_is_used_by_megatron_on_cuda(name: str, sources: str) -> None:
    if name == "full" and not VERSION.startswith("0.16."):
        pytest.skip("only 0.16 makes torch.full on CUDA")
    on_cuda = re.compile(r"device=(torch\.cuda\.current_device\(\)|['\"]cuda)")
    assert any(on_cuda.search(call) for call in calls(name, sources)), (
        f"Megatron makes no torch.{name} on CUDA: take it out"
    )


@pytest.mark.parametrize("name", sorted(cpu._COLLECTIVES))
def test_a_redirected_collective_is_used_by_megatron(name: str, sources: str) -> None:
    assert re.search(rf"torch\.distributed\.{name}\(", sources), f"Megatron no longer uses {name}: take it out"


def test_the_collectives_of_flat_buffers_are_still_called_by_these_names() -> None:
    source = inspect.getsource(param_and_grad_buffer)
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        assert source.count(f"{name}(") == 1 and getattr(param_and_grad_buffer, name).__module__ == cpu.__name__


def test_moving_tensors_to_the_host_is_still_only_for_tensors_on_cuda() -> None:
    numbers = torch.tensor([2, 3])
    original = inspect.getsource(moe_utils.maybe_move_tensor_to_cpu)
    assert "tensor.is_cuda" in original and "as_numpy" in original
    assert list(token_dispatcher.maybe_move_tensor_to_cpu(numbers, as_numpy=True)) == [2, 3]
    assert token_dispatcher.maybe_move_tensor_to_cpu(numbers) is numbers
    assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_the_redirected_methods_and_functions_are_used_by_megatron(sources: str) -> None:
    assert (
        re.search(r"\w\.cuda\(", sources) and re.search(r"\.type\(\) ", sources) and "torch.cuda.FloatTensor" in sources
    )
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        assert len(re.findall(rf"\b{name}\(", sources)) > 1  # the definition and a call


# --------------------------------------------------------------------------------------------------------- narrow
def test_every_loaded_module_of_megatron_sees_the_cpu(modules: list[ModuleType]) -> None:
    assert len(modules) > 50
    for module in modules:
        seen = module.torch
        assert seen is not torch, module.__name__
        assert seen.cuda.current_device() == torch.device("cpu")
        for tensor in (
            seen.zeros(2, device="cuda"),
            seen.ones(2, device=torch.device("cuda", 0)),
            seen.full((2,), 1.0, device=seen.cuda.current_device()),
            seen.tensor([1.0], device="cuda:0"),
            seen.empty(1, device="cuda"),
            seen.arange(3, device="cuda"),
        ):
            assert tensor.device.type == "cpu"
        assert seen.nn is torch.nn and seen.float32 is torch.float32  # the others belong to torch
        assert seen.cuda.is_available() is False


def test_torch_itself_stays_honest() -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        torch.cuda.current_device()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    for module in (rlhf_mcore.mcore.model, rlhf_mcore.mcore.optimizer):
        assert module.torch is torch


def test_preparing_twice_changes_nothing(modules: list[ModuleType]) -> None:
    before = [module.torch for module in modules]
    CpuPlatform().prepare_megatron()
    assert all(module.torch is view for module, view in zip(modules, before, strict=True))


def test_random_states_of_megatron_are_those_of_the_cpu() -> None:
    state = torch.get_rng_state()
    assert torch.equal(megatron_random._get_cuda_rng_state(), state)
    first = torch.rand(3)
    megatron_random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)


# --------------------------------------------------------------------------------------------------------- undone
def test_a_region_redirects_two_methods_of_tensors_and_puts_them_back() -> None:
    cuda, type_of = torch.Tensor.cuda, torch.Tensor.type
    x = torch.zeros(2)
    with CpuPlatform().megatron_region():
        assert x.cuda() is x
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor" and x.half().type() == "torch.cuda.HalfTensor"
        assert x.long().type() == "torch.LongTensor"
        assert x.type(torch.float64).dtype == torch.float64
        with CpuPlatform().megatron_region():  # like a model that is called during another call
            pass
        assert x.cuda() is x
    assert torch.Tensor.cuda is cuda and torch.Tensor.type is type_of


def test_a_region_is_left_by_an_exception_too() -> None:
    cuda, type_of = torch.Tensor.cuda, torch.Tensor.type
    with pytest.raises(KeyError), CpuPlatform().megatron_region():
        raise KeyError("in Megatron")
    assert torch.Tensor.cuda is cuda and torch.Tensor.type is type_of


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "1.16.0"])
def test_another_version_of_megatron_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_versions, "VERSION", version)
    with pytest.raises(RuntimeError, match=rf"megatron-core {version} is installed.*Install megatron-core 0\.16\.1"):
        CpuPlatform().prepare_megatron()
