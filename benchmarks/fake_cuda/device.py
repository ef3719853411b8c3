"""A fake CUDA device with tensors without data. Megatron's own code runs on it, and the requests of the host are counted."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

ATEN, CUDA = torch.ops.aten, torch.device("cuda", 0)
SYNC, LAUNCH, COLLECTIVE = "host syncs", "launches", "collectives"
TO_DEVICE, TO_HOST = "copies to device", "copies to host"
_NO_KERNEL = {"detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_"}
_DATA_DEPENDENT = {"nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "repeat_interleave"}


@dataclass(slots=True)
class Counts:
    """The number of events of each kind for each phase, and the lines of code that caused them."""

    phase: str = "setup"
    total: Counter[tuple[str, str]] = field(default_factory=Counter)
    places: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, kind: str) -> None:
        self.total[self.phase, kind] += 1
        if kind != LAUNCH:
            self.places[self.phase, kind, _caller()] += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count the events within this block under another phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


def _caller() -> str:
    """Return the innermost running line of Megatron or of this project."""
    for frame in reversed(traceback.extract_stack()):
        for root in ("rlhf_mcore/", "megatron/core/"):
            if root in frame.filename:
                return f"{root}{frame.filename.rpartition(root)[2]}:{frame.lineno} {frame.name}"
    return "?"


class Device(TorchDispatchMode):
    """Run operations on host tensors normally. Operations on CUDA tensors only compute shapes, and are counted.

    Operations on tensors of both devices raise, as on CUDA. A copy blocks the host, unless it is non-blocking and its host side is
    pinned. The host receives integers that follow from integers that it has sent, and ones instead of all other values.
    """

    def __init__(self, counts: Counts, selected: float) -> None:
        super().__init__()
        self.counts, self.fake, self._selected = counts, FakeTensorMode(allow_non_fake_inputs=True), selected
        self._pinned: dict[int, Tensor] = {}  # address -> pinned tensor
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()  # known values of integer tensors on the device

    def __enter__(self) -> Device:
        self.fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.fake.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_host = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if on_host and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return self._run_on_host(func, args, kwargs)
        name = func._schema.name.split("::")[1]
        if name in ("_to_copy", "copy_"):
            return self._copy(func, args, kwargs)
        if name == "_local_scalar_dense":
            self.counts.add(SYNC)
            kind = args[0].dtype
            if (known := self._values.get(args[0])) is not None:
                with unset_fake_temporarily():
                    return known.item()
            return False if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        if name in _DATA_DEPENDENT and kwargs.get("output_size") is None:
            self.counts.add(SYNC)
            return self._of_any_size(name, args)
        if func.namespace == "c10d":
            self.counts.add(COLLECTIVE)
        elif not func.is_view and not name.startswith(("empty", "new_empty")) and name not in _NO_KERNEL:
            self.counts.add(LAUNCH)
        result = self._run_on_fakes(func, args, kwargs)
        self._follow(func, args, kwargs, tensors, result)
        return result

    def _run_on_fakes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*tree_map_only(Tensor, self._to_fake, args), **tree_map_only(Tensor, self._to_fake, kwargs))

    def _follow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor], result: Any
    ) -> None:
        """Store the values of a result that follow from known values."""
        made = tree_leaves(result)
        if func._schema.is_mutable or any(
            not isinstance(each, FakeTensor) or each.is_floating_point() for each in made
        ):
            return
        if tensors and all(tensor in self._values or not isinstance(tensor, FakeTensor) for tensor in tensors):
            known_args, known_kwargs = tree_map_only(FakeTensor, self._values.__getitem__, (args, kwargs))
            if "device" in kwargs:
                known_kwargs["device"] = "cpu"
            with unset_fake_temporarily():
                self._values.update(zip(made, tree_leaves(func(*known_args, **known_kwargs)), strict=True))

    def _to_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", None) or func is ATEN._pin_memory.default
        if func is ATEN.is_pinned.default:
            return self._is_pinned(args[0])
        with unset_fake_temporarily():
            result = args[0].clone() if func is ATEN._pin_memory.default else func(*args, **kwargs)
        if pinned:
            self._pinned[result.untyped_storage().data_ptr()] = result
        return result

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, FakeTensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count a copy, or a conversion on the device, and return its result."""
        if func is ATEN.copy_.default:
            target, source, no_wait = args[0], args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            to = target.device.type
        else:
            source, no_wait = args[0], kwargs.get("non_blocking", False)
            to = torch.device(kwargs.get("device") or source.device).type
        if source.device.type == to:
            self.counts.add(LAUNCH)
            result = self._run_on_fakes(func, args, kwargs)
            self._follow(func, args, kwargs, [source], result)
            return result
        if to == "cpu":
            self.counts.add(TO_HOST)
            # torch pins the result of `to("cpu", non_blocking=True)`.
            if not no_wait or (func is ATEN.copy_.default and not self._is_pinned(target)):
                self.counts.add(SYNC)
            if func is ATEN.copy_.default:
                return target
            with unset_fake_temporarily():
                known = self._values.get(source, torch.ones(source.shape, dtype=source.dtype))
                return known.to(kwargs.get("dtype") or source.dtype, copy=True)
        self.counts.add(TO_DEVICE)
        if not no_wait or not self._is_pinned(source):
            self.counts.add(SYNC)
        kwargs.pop("pin_memory", None)
        result = self._run_on_fakes(func, args, kwargs)
        if func is not ATEN.copy_.default and not source.is_floating_point():
            with unset_fake_temporarily():
                self._values[result] = source.to(result.dtype, copy=True)
        return result

    def _of_any_size(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return a result of the largest possible size of the operation, or of the expected size."""
        if name == "equal":
            return True
        if name == "nonzero":
            return args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        if name == "masked_select":
            return args[0].new_empty(int(args[1].numel() * self._selected))
        raise NotImplementedError(f"aten::{name} on a fake device: give it its output's size, or say here what that is")


class _Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None:
        self._counts.add(SYNC)


class _Stream:
    """Replaces torch.cuda.Stream."""

    device = CUDA

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event(self._counts)

    def synchronize(self) -> None:
        self._counts.add(SYNC)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _rng_state(*args: Any, **kwargs: Any) -> Tensor:
    return torch.empty(16, dtype=torch.uint8)


@contextmanager
def cuda_names(counts: Counts) -> Iterator[None]:
    """Within this block, replace the functions of ``torch.cuda`` that need a driver. ``is_available`` stays false."""
    from megatron.core.tensor_parallel import random

    stream = _Stream(counts)
    names: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: (9, 0),
        "synchronize": lambda device=None: counts.add(SYNC),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "Stream": lambda *args, **kwargs: _Stream(counts),
        "Event": lambda **kwargs: _Event(counts),
        "stream": lambda stream: nullcontext(),
        "manual_seed": _nothing,
        "get_rng_state": _rng_state,
        "set_rng_state": _nothing,
        "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing),
        "_lazy_init": _nothing,
    }
    states = patch.multiple(random, _get_cuda_rng_state=_rng_state, _set_cuda_rng_state=_nothing)
    with patch.multiple(torch.cuda, **names), states:
        yield


def move_module(module: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """Replace ``Module._apply``, which cannot store a fake tensor in an existing parameter."""
    for child in module.children():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None and (moved := function(parameter.detach())) is not parameter:
            new = torch.nn.Parameter(moved, parameter.requires_grad)
            vars(new).update(vars(parameter))
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


@contextmanager
def fake_device(selected: float = 1.0) -> Iterator[Counts]:
    """Within this block, CUDA tensors have no data. Yields the counts.

    ``selected``: share of true elements in a mask, if the size of a result depends on it.
    """
    counts = Counts()
    with ExitStack() as stack:
        stack.enter_context(cuda_names(counts))
        stack.enter_context(patch.object(torch.nn.Module, "_apply", move_module))
        # The method of a fake tensor requests one element after the other, but on CUDA it copies all elements at once.
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()))
        stack.enter_context(patch.object(Tensor, "record_stream", _nothing))
        stack.enter_context(Device(counts, selected))
        yield counts
