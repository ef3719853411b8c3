"""Check the errors, the known values and the counts of the fake device, in a separate program, because the guard precedes torch."""

from __future__ import annotations

import json
import os
import sys

from benchmarks.fake_cuda import guard

guard.load()

import torch  # noqa: E402

from benchmarks.fake_cuda.device import LAUNCH, SYNC, TO_DEVICE, TO_HOST, fake_device  # noqa: E402


def main() -> None:
    told: dict[str, object] = {}
    with fake_device() as counts:
        lengths = torch.tensor([0, 24, 64], dtype=torch.int32)
        pinned = lengths.pin_memory()
        weight = torch.zeros(4, 4, device="cuda", requires_grad=True)
        try:
            weight + torch.ones(4)
        except RuntimeError as error:
            told["refused"] = str(error)

        def count(name: str) -> None:
            told[name] = [counts.total["setup", kind] for kind in (SYNC, TO_DEVICE, TO_HOST, LAUNCH)]
            counts.total.clear()

        count("before")
        on_device = lengths.to("cuda", non_blocking=True)
        count("copied from pageable memory")
        on_device = pinned.to("cuda", non_blocking=True)
        count("copied from pinned memory")
        pinned.to("cuda")
        count("copied and waited for")
        sizes = on_device[1:] - on_device[:-1]
        count("computed")
        told["sizes"] = sizes.tolist()
        count("read")
        (weight.sum() * 2).backward()
        count("backward")
        weight.grad.nonzero()
        count("of a size that the device knows")
        bool(sizes.sum() == 64)
        count("asked")
        told["on the host"] = [lengths.diff().tolist(), type(lengths.diff()).__name__]
    print(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # torch would use the device again at its shutdown


main()
