"""Memory, copies and threads of ``CudaPlatform``, on a device that copies late."""

from __future__ import annotations

import gc
import logging
import mmap

import pytest
import torch

from rlhf_mcore.platform import current_platform
from tests.late_device import LateCuda, install


def test_pinned_memory_is_as_large_as_asked_for_and_forgotten_when_it_is_freed(late_cuda: LateCuda) -> None:
    size = 5 * mmap.PAGESIZE + 7
    buffers = [current_platform().host_buffer(size) for _ in range(2)]
    assert all(buffer.numel() == size and buffer.dtype == torch.uint8 for buffer in buffers)
    assert late_cuda.pinned == {buffer.data_ptr(): size for buffer in buffers}
    part = buffers[0][mmap.PAGESIZE : mmap.PAGESIZE + 8].view(torch.float32)
    del buffers
    gc.collect()
    assert late_cuda.pinned_bytes == size, "a view keeps its own"
    part.fill_(1.5)
    assert part.tolist() == [1.5, 1.5]
    del part
    gc.collect()
    assert late_cuda.pinned == {} and current_platform().host_buffer(0).numel() == 0


def test_memory_that_cuda_does_not_pin_serves_and_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, told = install(monkeypatch, refuses=2), list[str]()
    monkeypatch.setattr(logging.getLogger("rlhf_mcore.platform.cuda"), "warning", told.append)
    buffer = current_platform().host_buffer(2**30)
    buffer[-3:] = 7
    assert buffer[-4:].tolist() == [0, 7, 7, 7] and buffer.numel() == 2**30
    assert cuda.last_error == 0, "the next launch would raise it"
    assert len(told) == 1 and "could not pin 1.0 GiB of host memory (cudaHostRegister: error 2)" in told[0]


def test_copies_arrive_when_they_are_waited_for(late_cuda: LateCuda) -> None:
    copies, device = current_platform().copies(), torch.arange(8, dtype=torch.float32)
    host = current_platform().host_buffer(32).view(torch.float32)
    wait = copies([(host, device)])
    wait()
    device.zero_()  # the device goes on when the copy is made
    assert bool(host.isnan().all()), "the host has not waited"
    copies.synchronize()
    assert host.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    wait = copies([(device, host)])
    assert bool(device.isnan().all())
    wait()
    assert device.tolist() == host.tolist() and late_cuda.num_late == 2


def test_a_thread_copies_beside_the_computation(late_cuda: LateCuda) -> None:
    platform, device = current_platform(), torch.ones(4)
    host = platform.host_buffer(16).view(torch.float32)
    seen = []

    def read() -> None:
        host.copy_(device, non_blocking=True)
        seen.append(bool(host.isnan().all()))

    platform.in_thread(read).result()
    assert seen == [True] and host.tolist() == [1, 1, 1, 1] and late_cuda.num_late == 1


def test_what_the_computation_copies_to_the_host_is_there_when_the_device_was_waited_for(late_cuda: LateCuda) -> None:
    platform, device = current_platform(), torch.ones(4)
    host = platform.host_buffer(16).view(torch.float32)
    host.copy_(device, non_blocking=True)
    device.zero_()  # after it, for the device
    assert bool(host.isnan().all())
    platform.synchronize()
    assert host.tolist() == [1, 1, 1, 1]


def test_memory_that_was_given_back_comes_without_its_values(late_cuda: LateCuda) -> None:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(16)
    assert bool(tensor.isnan().all()) and late_cuda.pinned == {}


def test_a_copy_of_memory_that_was_freed_before_it_was_made_is_a_mistake(late_cuda: LateCuda) -> None:
    device, host = torch.ones(4), current_platform().host_buffer(16).view(torch.float32)
    wait = current_platform().copies()([(host, device)])
    device.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="freed before a copy"):
        wait()
    assert late_cuda.num_late == 1
