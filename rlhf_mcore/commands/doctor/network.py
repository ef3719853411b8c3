"""Measure latency and bandwidth between ranks, and the difference of their clocks. All functions are collective over the world."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhf_mcore.commands.doctor.findings import SYNCHRONISE, Finding, judge
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.platform import Platform

_REPEATS = 5
_SLOW_GPU_LINK = 5e9  # bytes/s between neighbours; NVLink is 20 to 180 times faster, 400G InfiniBand 10 times
_SPREAD_S = 1.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic between ranks: time of a small all-reduce, bus bandwidth of a large all-reduce, and bandwidth to the next rank."""

    latency_s: float
    bus_bytes_per_s: float
    link_bytes_per_s: Sequence[float]  # by sending rank
    clock_spread_s: float


def measure(platform: Platform, num_bytes: int) -> Traffic:
    """Measure medians over a few repeats, between at least two ranks.

    Bus bandwidth is 2 (n - 1) / n times bytes over time, as in nccl-tests.
    """
    size, device = dist.get_world_size(), platform.device()
    assert size > 1, "a single rank has no traffic"
    small, large = torch.ones(1, device=device), torch.ones(num_bytes // 4, device=device)
    incoming = torch.empty_like(large)
    latency = _median_s(lambda: dist.all_reduce(small), platform, 5 * _REPEATS)
    reduce_s = _median_s(lambda: dist.all_reduce(large), platform, _REPEATS)
    shift_s = _median_s(lambda: _shift(large, incoming), platform, _REPEATS)
    nbytes = large.numel() * large.element_size()
    dist.barrier()
    clocks = [float(value) for value in all_gather_json(time.time())]
    links = [float(value) for value in all_gather_json(nbytes / shift_s)]
    return Traffic(latency, 2 * (size - 1) / size * nbytes / reduce_s, links, max(clocks) - min(clocks))


def _median_s(action: Callable[[], object], platform: Platform, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        platform.synchronize()
        started = time.perf_counter()
        action()
        platform.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[repeats // 2]  # the first repeat opens connections


def _shift(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to the next rank and receive from the previous rank, on all ranks at the same time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = [
        dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def judge_traffic(traffic: Traffic, backend: str, nodes: Sequence[str]) -> Iterator[Finding]:
    """Judge the measured traffic. ``nodes`` contains the host name of every rank."""
    rates = f"all-reduce {traffic.latency_s * 1e6:.0f} us, bus {traffic.bus_bytes_per_s / 1e9:.2f} GB/s"
    links = traffic.link_bytes_per_s
    slowest = min(range(len(links)), key=lambda rank: links[rank])
    following, shown = (slowest + 1) % len(nodes), f"{links[slowest] / 1e9:.2f} GB/s"
    yield Finding(f"{backend}, {len(nodes)} ranks", "ok", f"{rates}; slowest link {shown}")
    if backend == "nccl" and links[slowest] < _SLOW_GPU_LINK:
        yield Finding(
            "network",
            "warning",
            f"rank {slowest} on {nodes[slowest]} to rank {following} on {nodes[following]}: {shown}",
            "syncs, pipeline exchanges and gradient reductions wait for this link",
            "look for 'via NET/Socket' in NCCL_DEBUG=INFO: InfiniBand or NVLink is not used; set NCCL_IB_HCA or "
            "NCCL_SOCKET_IFNAME",
        )
    spread = traffic.clock_spread_s
    yield judge(
        "clocks of the ranks",
        "warning" if spread > _SPREAD_S else None,
        f"{spread:.1f} s apart" if spread > _SPREAD_S else f"{spread * 1e3:.1f} ms apart at most",
        "times in logs and traces of different nodes cannot be compared",
        SYNCHRONISE,
    )
