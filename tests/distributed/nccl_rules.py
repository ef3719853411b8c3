"""Enforce the rules of NCCL in tests over gloo. A test then fails if a run on GPUs would hang or compute with garbage.

:func:`enforce` puts a check before the functions of torch.distributed. On a GPU, a group sends device tensors through
NCCL and host tensors through gloo. In tests all tensors are on the host. Every operation therefore counts as a device
operation, except operations of the modules in HOST and of vLLM's host groups. The rules:

- If the first operation of a rank on a group is a batch of messages, it waits until every rank has started an operation on this group.
- Ranks run the same operations in the same order, with the same dtype and size. NCCL ignores tags.
- A batch contains at most 256 messages.
- Only one thread at a time uses a group.
- Host tensors must not enter a group that is only for NCCL, and device tensors must not enter a group that is only for gloo.
- Until an operation is waited for, its destination contains garbage, and its source must not change.

Ranks compare operations through files. Each rank appends a record per operation, and the second rank sees both records.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from rlhf_mcore.bridge.run import transports
from rlhf_mcore.parallel import collectives, rows
from rlhf_mcore.platform import ModuleView

VARIABLE = "NCCL_RULES"  # environment variable with a directory that all ranks of all groups share
HOST = (collectives, rows)  # modules with host tensors; messages of SharedMemory are host tensors too
MAX_BATCH, GARBAGE, RECORD = 256, 0xA5, 128  # a record that crosses a page could be read in part
# Operation -> (the argument with the same size on all ranks, the arguments that it writes).
_GATHER, _SCATTER = ("input_tensor", "output_tensor"), ("output", "output")
OPERATIONS: dict[str, tuple[str | None, str]] = {
    "all_reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
    "reduce": ("tensor", "tensor"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("tensor", "tensor"),
    "all_gather": (None, "tensor_list"),  # NCCL accepts parts of different sizes
    "reduce_scatter": (None, "output"),
    "all_to_all": (None, "output_tensor_list"),
    "all_to_all_single": (None, "output"),
    **dict.fromkeys(("all_gather_into_tensor", "_all_gather_base", "all_gather_single"), _GATHER),
    **dict.fromkeys(("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter_single"), _SCATTER),
}


class BrokenRule(AssertionError):
    """An operation that NCCL would reject or execute incorrectly."""


@dataclass(slots=True)
class _Group:
    """The operations of this rank on a group."""

    name: str
    rank: int
    size: int
    directory: Path
    thread: threading.Thread | None = None
    has_entered: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    files: dict[str, int] = field(default_factory=dict)

    def agree(self, sequence: str, mine: object, others: Sequence[object], text: str) -> None:
        """Append a record to this rank's end of a sequence, and compare it with the records at the same position of other ends."""
        number, record = self.counts[sequence], text.encode()[:RECORD].ljust(RECORD)
        self.counts[sequence] += 1
        os.pwrite(self._file(f"{sequence}.{mine}"), record, number * RECORD)
        for other in others:
            theirs = os.pread(self._file(f"{sequence}.{other}"), RECORD, number * RECORD)
            if theirs and theirs != record:
                shown = theirs.decode().rstrip()
                raise BrokenRule(f"{sequence} {number} of group {self.name}: '{text}' at {mine}, '{shown}' at {other}")

    def missing(self) -> list[int]:
        """Return the ranks that have not started an operation on the group."""
        return [rank for rank in range(self.size) if not (self.directory / f"entered.{rank}").exists()]

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)

    def _file(self, name: str) -> int:
        if name not in self.files:
            self.files[name] = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        return self.files[name]


class _Late:
    """Operations in flight. As with NCCL, a batch is one operation. Results are visible only after a wait."""

    def __init__(
        self, works: list[Any], brought: list[tuple[Tensor, Tensor]], sent: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._works, self._brought, self._sent = works, brought, sent
        for tensor, _ in brought:
            garbage = torch.full((tensor.numel() * tensor.element_size(),), GARBAGE, dtype=torch.uint8)
            tensor.copy_(garbage.view(tensor.dtype).view(tensor.shape))

    def wait(self, *timeout: Any) -> bool:
        failures = []
        while self._works:  # wait once for each, because a second wait never returns in gloo
            try:
                self._works.pop(0).wait(*timeout)
            except RuntimeError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        brought, sent, self._brought, self._sent = self._brought, self._sent, [], []
        for tensor, hidden in brought:
            tensor.copy_(hidden)
        for tensor, copy in sent:
            if not torch.equal(_bits(tensor), _bits(copy)):
                raise BrokenRule(f"{tensor.dtype} {list(tensor.shape)} was changed while it was sent")
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Rules:
    """The checks of this process.

    Args:
        root: a directory that all ranks of all groups share.
        patience_s: time that the first operation of a group waits until all ranks have started an operation.
    """

    def __init__(self, root: Path, patience_s: float = 120) -> None:
        self.patience_s, self._root = patience_s, root
        self._groups: dict[Any, _Group] = {}
        self._alone: dict[Any, str] = {}  # groups with a single backend
        self._engines_host: set[Any] = set()  # engine groups for host tensors
        self._here = (
            threading.local()
        )  # .is_host: operations count as host operations; .batch: works of the batch that is being started
        self._original = {name: getattr(dist, name) for name in OPERATIONS if hasattr(dist, name)}
        self._isend, self._irecv, self._batch = c10d.isend, c10d.irecv, c10d.batch_isend_irecv
        self._new_group, self._destroy = c10d.new_group, c10d.destroy_process_group

    def enforce(self) -> None:
        """Put the checks before the functions of torch.distributed."""
        for name in self._original:
            setattr(dist, name, self._collective(name))
        for checked in (self.isend, self.irecv, self.batch_isend_irecv, self.new_group, self.destroy_process_group):
            for module in (dist, c10d):  # c10d compares the operations of a batch with its own names
                setattr(module, checked.__name__, checked)
        for module in HOST:
            module.dist = ModuleView(dist, {name: self._of_host(name) for name in self._original})  # type: ignore[attr-defined]
        shared = transports.SharedMemory.__init__
        rules = self

        class HostLinks(transports.Links):
            """Links with host messages."""

            def __init__(self, links: transports.Links) -> None:
                self._links = links

            def exchange(self, *arguments: Any, **options: Any) -> Any:
                with rules.host():
                    return self._links.exchange(*arguments, **options)

        def init(transport: Any, links: transports.Links, *arguments: Any) -> None:
            shared(transport, HostLinks(links), *arguments)

        transports.SharedMemory.__init__ = init  # type: ignore[method-assign]
        if (vllm := sys.modules.get("vllm.distributed.parallel_state")) is not None:
            self.take_for_cuda(vllm.GroupCoordinator)

    def take_for_cuda(self, coordinator: Any) -> None:
        """Build vLLM's groups as on CUDA: an NCCL group for device tensors and a gloo group for host tensors."""
        original = coordinator.__init__
        signature = inspect.signature(original)

        @wraps(original)
        def init(*arguments: Any, **options: Any) -> None:
            bound = signature.bind(*arguments, **options).arguments
            self._here.is_engine = True
            try:
                original(**bound | {"torch_distributed_backend": "nccl"})
            finally:
                self._here.is_engine = False

        coordinator.__init__ = init

    @contextmanager
    def host(self) -> Iterator[None]:
        """Count operations of this thread as host operations within the block."""
        self._here.is_host = True
        try:
            yield
        finally:
            self._here.is_host = False

    # ------------------------------------------------------------------------------------------ groups
    def new_group(self, *arguments: Any, **options: Any) -> Any:
        bound = inspect.signature(self._new_group).bind(*arguments, **options).arguments
        alone = bound.get("backend")
        if alone == "nccl":
            bound["backend"] = "gloo"
        group = self._new_group(**bound)
        if alone is not None:
            self._alone[group] = alone
        if alone == "gloo" and getattr(self._here, "is_engine", False):
            self._engines_host.add(group)
        return group

    def destroy_process_group(self, group: Any = None) -> None:
        for left in [self._resolve(group)] if group is not None else list(self._groups):
            if (known := self._groups.pop(left, None)) is not None:
                known.close()
            self._alone.pop(left, None)
            self._engines_host.discard(left)
        self._destroy(group)

    def _resolve(self, group: Any) -> Any:
        return c10d.group.WORLD if group is None else group

    def _enter(self, group: Any, is_batch: bool = False) -> _Group | None:
        """Return the state of a group before a device operation, or None if there is nothing to check."""
        group = self._resolve(group)
        if group is None or not isinstance(group, dist.ProcessGroup) or group.size() == 1:
            return None
        if getattr(self._here, "is_host", False) or group in self._engines_host:
            self._check_alone(group, "nccl", "host")
            return None
        self._check_alone(group, "gloo", "device")
        if group not in self._groups:
            self._groups[group] = _Group(group.group_name, group.rank(), group.size(), self._directory(group))
        state = self._groups[group]
        thread = threading.current_thread()
        if state.thread not in (None, thread) and state.thread.is_alive():
            raise BrokenRule(f"threads {state.thread.name} and {thread.name} use group {state.name}")
        state.thread = thread
        if not state.has_entered:
            state.has_entered = True
            (state.directory / f"entered.{state.rank}").touch()
            if is_batch:
                self._wait_for_all(state)
        return state

    def _check_alone(self, group: Any, backend: str, where: str) -> None:
        if self._alone.get(group) == backend:
            raise BrokenRule(f"a tensor of the {where} in group {group.group_name}, which is of {backend} alone")

    def _wait_for_all(self, state: _Group) -> None:
        until = time.monotonic() + self.patience_s
        while missing := state.missing():
            if time.monotonic() > until:
                raise BrokenRule(
                    f"the first operation of group {state.name} is a batch of messages that ranks {missing} take no part in"
                )
            time.sleep(0.002)

    def _directory(self, group: Any) -> Path:
        """Return the directory for the records of a group. Its first rank creates it."""
        store = c10d._world.pg_map[group][1]
        if store.add("nccl_rules", 1) == 1:
            store.set("nccl_rules_directory", tempfile.mkdtemp(dir=self._root))
        return Path(store.get("nccl_rules_directory").decode())

    # ------------------------------------------------------------------------------------------ collectives
    def _of_host(self, name: str) -> Callable[..., Any]:
        original = self._original[name]

        def call(*arguments: Any, **options: Any) -> Any:
            with self.host():
                self._enter(options.get("group"))
            return original(*arguments, **options)

        return call

    def _collective(self, name: str) -> Callable[..., Any]:
        original, (sized, written) = self._original[name], OPERATIONS[name]
        signature = inspect.signature(original)

        @wraps(original)
        def check(*arguments: Any, **options: Any) -> Any:
            call = signature.bind(*arguments, **options)
            call.apply_defaults()
            bound = call.arguments
            group = self._resolve(bound.get("group"))
            state = self._enter(group)
            if state is None:
                return original(*arguments, **options)
            root = _root(bound, group)
            state.agree("collective", state.rank, range(state.size), _description(name, bound, sized, root))
            if not bound.get("async_op") or group in c10d._world.pg_coalesce_state:
                return original(*arguments, **options)
            hidden = {key: _copy(value) for key, value in bound.items()}
            is_sender = root == state.rank and name in ("broadcast", "scatter")
            brought = [] if is_sender else list(zip(_tensors(bound, written), _tensors(hidden, written), strict=True))
            return _Late([original(**hidden)], brought, [])

        return check

    # ------------------------------------------------------------------------------------------ messages
    def isend(self, tensor: Tensor, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
        return self._message(tensor, dst, group, tag, group_dst, is_send=True)

    def irecv(self, tensor: Tensor, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
        return self._message(tensor, src, group, tag, group_src, is_send=False)

    def _message(self, tensor: Tensor, world_peer: Any, group: Any, tag: int, peer: Any, is_send: bool) -> Any:
        begin = self._isend if is_send else self._irecv
        place = "group_dst" if is_send else "group_src"
        group = self._resolve(group)
        peer = dist.get_group_rank(group, world_peer) if peer is None else peer
        batch = getattr(self._here, "batch", None)
        state = batch.state if batch is not None else self._enter(group)
        if state is None:
            return begin(tensor, group=group, tag=tag, **{place: peer})
        sender, receiver = (state.rank, peer) if is_send else (peer, state.rank)
        text = f"{tensor.dtype} {tensor.numel()}"
        if batch is not None:
            # Uses the communicator of the group, in order with its collectives.
            text += f" after {state.counts['collective']} collectives"
            state.agree(f"message {sender}-{receiver}", state.rank, [peer], text)
        else:
            # Uses a communicator of both ranks, which executes operations of both directions one after the other.
            pair = f"{min(sender, receiver)}-{max(sender, receiver)}"
            state.agree(f"message alone {pair}", state.rank, [peer], f"{sender} to {receiver} {text}")
        data = tensor.data
        hidden = data.clone() if is_send else torch.empty_like(data)
        late = batch or _Begun(state)
        late.works.append(begin(hidden, group=group, tag=tag, **{place: peer}))
        (late.sent if is_send else late.brought).append((data, hidden))
        return _Late(late.works, late.brought, late.sent) if batch is None else None

    def batch_isend_irecv(self, operations: list[Any]) -> list[Any]:
        if (state := self._enter(operations[0].group, is_batch=True)) is None:
            return list(self._batch(operations))
        if len(operations) > MAX_BATCH:
            raise BrokenRule(f"a batch of {len(operations)} messages: NCCL takes {MAX_BATCH}")
        self._here.batch = begun = _Begun(state)
        try:
            self._batch(operations)
        finally:
            self._here.batch = None
        return [_Late(begun.works, begun.brought, begun.sent)]


@dataclass(slots=True)
class _Begun:
    state: _Group
    works: list[Any] = field(default_factory=list)
    brought: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sent: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def _root(bound: dict[str, Any], group: Any) -> int | None:
    for key in ("group_src", "group_dst"):
        if bound.get(key) is not None:
            return int(bound[key])
    for key in ("src", "dst"):
        if bound.get(key) is not None:
            return int(dist.get_group_rank(group, bound[key]))
    return None


def _description(name: str, bound: dict[str, Any], sized: str | None, root: int | None) -> str:
    first = next(tensor for key in bound for tensor in _tensors(bound, key))
    parts = [name, str(first.dtype), "" if sized is None else str(bound[sized].numel())]
    parts += [str(bound["op"])] if "op" in bound else []
    return " ".join(parts + ([] if root is None else [f"root {root}"]))


def _tensors(bound: dict[str, Any], key: str) -> list[Tensor]:
    value = bound.get(key)
    if isinstance(value, Tensor):
        return [value.data]
    return [tensor.data for tensor in value if isinstance(tensor, Tensor)] if isinstance(value, list) else []


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data.clone()
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


_enforced: list[Rules] = []


def enforce() -> None:
    """Enforce the rules in this process if the environment names a directory for records."""
    if VARIABLE in os.environ:
        _enforced.append(Rules(Path(os.environ[VARIABLE])))
        _enforced[-1].enforce()


def current_rules() -> Rules:
    """Return the rules of this process."""
    return _enforced[-1]
