"""Small collectives on host data, without pickles.

They send JSON, reduce named numbers, share errors among ranks, and send requests of the first rank to all. Two classes at the
end use the store of the world: a barrier with a progress counter, and a counter of claimed numbers.
tests/distributed/nccl_rules.py counts everything here as an operation of the host.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.protocols import PeersLost

T = TypeVar("T")
POLL_S = 1.0
_FOREVER = timedelta(days=3650)


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks, for functions that require a group."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return group


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's JSON-able value, in rank order."""
    data = _encode(value)
    sizes = _gather_sizes(data.numel(), group)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    out = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(out, padded, group=group)
    return [_decode(part[:size]) for part, size in zip(out, sizes, strict=True)]


def _gather_sizes(size: int, group: dist.ProcessGroup | None) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([size]), group=group)
    return [int(s) for s in sizes]


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate host tensors [n_r, ...] of all ranks, whose first sizes may differ."""
    sizes = _gather_sizes(rows.size(0), group)
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: rows.size(0)] = rows
    out = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(out, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(out, sizes, strict=True)])


def broadcast_bytes(value: bytes | None, source: int, group: dist.ProcessGroup | None = None) -> bytes | None:
    """Return the bytes, or None, of group rank ``source`` on every rank of the group.

    None and empty bytes are one small message, others are two messages.
    """
    is_source = (group or world_group()).rank() == source
    size = torch.tensor([-1 if value is None else len(value)])
    dist.broadcast(size, group=group, group_src=source)
    if size <= 0:
        return None if size < 0 else b""
    data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if is_source and value else None
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=source)
    return data.numpy().tobytes()


def broadcast_json(value: Any, source: int, group: dist.ProcessGroup | None = None) -> Any:
    """Return the JSON-able value of group rank ``source``, on every rank of the group."""
    is_source = (group or world_group()).rank() == source
    return json.loads(broadcast_bytes(json.dumps(value if is_source else None).encode(), source, group) or b"")


def reduce_sums(values: Mapping[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sum named numbers over ranks. For names that end in ``_max``, return the maximum instead.

    Every rank passes the same names.
    """
    names = sorted(values)
    sums = torch.tensor([values[name] for name in names], dtype=torch.float64)
    maxima = sums.clone()
    dist.all_reduce(sums, group=group)
    dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
    return {name: float(maxima[i] if name.endswith("_max") else sums[i]) for i, name in enumerate(names)}


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's JSON-able value on the first rank of the group, in rank order; [] on the others."""
    return [json.loads(part) for part in gather_bytes(json.dumps(value).encode(), group)]


def gather_bytes(value: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's bytes on the first rank of the group, in rank order; [] on the others."""
    data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    sizes = _gather_sizes(data.numel(), group)
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    out = [torch.empty_like(padded) for _ in sizes] if (group or world_group()).rank() == 0 else None
    dist.gather(padded, out, group=group, group_dst=0)
    return [part[:size].numpy().tobytes() for part, size in zip(out or [], sizes if out else [], strict=True)]


def all_gather_unique_json(value: Any, group: dist.ProcessGroup | None = None) -> list[tuple[Any, list[int]]]:
    """Return the distinct JSON-able values of the ranks, each with its group ranks, in order of their first rank.

    Each value is sent only once, so a few distinct values among thousands of ranks are cheap.
    """
    data = _encode(value)
    digest = torch.frombuffer(bytearray(blake2b(data.numpy().tobytes(), digest_size=16).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, digest, group=group)
    holders: dict[bytes, list[int]] = {}
    for rank, other in enumerate(digests):
        holders.setdefault(bytes(other.tolist()), []).append(rank)
    return [(broadcast_json(value, ranks[0], group), ranks) for ranks in holders.values()]


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The error of a rank: its class, its errno (OSErrors only) and its text."""

    rank: int
    kind: str
    errno: int | None
    text: str

    def __str__(self) -> str:
        named = self.errno is not None or self.kind == ConfigError.__name__
        return f"rank {self.rank}: {self.text if named else f'{self.kind}: {self.text}'}"


class RanksFailed(RuntimeError):
    """Other ranks failed. It is raised on the ranks without an error."""

    def __init__(self, failures: list[RankFailure]) -> None:
        self.failures = failures
        super().__init__("; ".join(str(failure) for failure in failures))


def gather_failures(error: Exception | None, group: dist.ProcessGroup | None = None) -> list[RankFailure]:
    """Gather the errors of all ranks, in rank order and equal on all ranks.

    Return [] if every rank passes None. Collective.
    """
    own = None
    if error is not None:
        kind = ConfigError if isinstance(error, ConfigError) else type(error)
        own = (kind.__name__, error.errno if isinstance(error, OSError) else None, str(error))
    return [RankFailure(rank, *parts) for rank, parts in enumerate(all_gather_json(own, group)) if parts is not None]


def on_every_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run an action that may fail on some ranks, and then raise on all ranks, so that no rank waits for another.

    Collective.

    The action itself must not wait for other ranks, because they may have failed.

    Raises:
        ConfigError: on every rank, if all errors are the user's mistakes.
        RanksFailed: on the ranks without an error; the others raise their own.
    """
    caught: Exception | None = None
    try:
        result = action()
    except Exception as error:
        caught = error
    failures = gather_failures(caught, group)
    if not failures:
        return result
    if all(failure.kind == ConfigError.__name__ for failure in failures):
        raise ConfigError(failures[0].text) from caught
    raise caught if caught is not None else RanksFailed(failures)


# Send a request to all ranks and return their answers in rank order. Both are JSON.
Ask = Callable[[Any], list[Any]]


def lead(action: Callable[[Ask], T], serve: Callable[[Any], Any], otherwise: T) -> T:
    """Run ``action`` on the first rank while all ranks ``serve`` its requests. Collective over the world.

    A rank waits for others only as long as their answers to a request differ in time. ``serve`` must not raise.

    Returns:
        The result of the action on the first rank, and ``otherwise`` on the others.
    """
    if dist.get_rank() != 0:
        while (request := broadcast_json(None, 0)) is not None:
            gather_json(serve(request))
        return otherwise
    waiting = True  # whether the other ranks wait for a request

    def ask(request: Any) -> list[Any]:
        nonlocal waiting
        waiting = False
        broadcast_json(request, 0)
        answers = gather_json(serve(request))
        waiting = True
        return answers

    try:
        return action(ask)
    finally:
        if waiting:
            broadcast_json(None, 0)


class SharedProgress:
    """A barrier of the world without a fixed deadline, with a progress counter in the world's store.

    All ranks build it together.

    The deadline of a collective starts when the first rank enters. A rank that samples a long response would miss it.
    The barrier is a sum on the host, so it fails at once if another process stops.

    Args:
        limit_s: seconds to wait without progress of any rank.
        beat: reports progress to the watchdog.
    """

    def __init__(self, limit_s: float, beat: Callable[[], object]) -> None:
        self._limit_s, self._beat = limit_s, beat
        # A store can serve several runs, so the counter has a random name.
        self._key = f"progress/{broadcast_json(secrets.token_hex(8), 0)}"
        self._store = dist.distributed_c10d._get_default_store()

    def note(self) -> None:
        """Report progress of this rank, about once per second."""
        self._beat()
        self._store.add(self._key, 1)

    def wait(self) -> None:
        """Wait until all ranks arrive. Collective over the world.

        Raises:
            PeersLost: no rank made progress for ``limit_s``.
        """
        options = AllreduceOptions()
        options.timeout = _FOREVER
        work = world_group().allreduce([torch.zeros(1)], options)
        seen, since = -1, time.monotonic()
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=POLL_S))
            except RuntimeError:  # not yet complete, or failed
                if work.is_completed():
                    break
            if (count := self._store.add(self._key, 0)) != seen:
                seen, since = count, time.monotonic()
                self._beat()
            elif time.monotonic() - since > self._limit_s:
                raise PeersLost(
                    f"other ranks are still sampling, but no rank generated a token for {self._limit_s:g} s "
                    "(trainer.collective_timeout_s)"
                )
        work.wait()


class StoreClaims:
    """Give each of the numbers 0, 1, 2, ... to one engine, in the order of requests.

    All ranks build it together. Only the leads of engines use it.
    """

    def __init__(self) -> None:
        # A store can serve several runs, so the counter has a random name.
        name = broadcast_json(secrets.token_hex(8), 0)
        self._store = dist.PrefixStore(f"claims/{name}", dist.distributed_c10d._get_default_store())
        self._round = 0

    def begin(self) -> None:
        """Restart counting at 0. Every engine calls it the same number of times."""
        self._round += 1

    def claim(self, count: int) -> int:
        """Return the first of ``count`` numbers."""
        return int(self._store.add(f"{self._round}", count)) - count
