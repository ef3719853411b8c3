"""Count the bytes that one rank's forward, backward and optimizer step allocate, without weights, devices or other ranks.

Megatron's own model, schedule and optimizer run on fake tensors (shapes without data). The process group is fake too.
Its collectives return at once. A fake tensor has no values. If code reads a value, it is the same for every token.
Experts therefore get equally many tokens, and losses are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch
from weakref import WeakSet, finalize

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import mlp
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rlhf_mcore.mcore import momentum
from rlhf_mcore.mcore import optimizer as own_optimizer
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.layers import RMSNorm
from rlhf_mcore.mcore.model import LossFunction, MegatronModel
from rlhf_mcore.mcore.model_spec import ModelSpec
from rlhf_mcore.parallel import logprobs
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform
from rlhf_mcore.types import Microbatch

_ATEN, _DEVICE = torch.ops.aten, torch.ops.prim.device.default


@dataclass(frozen=True, slots=True)
class TracedBytes:
    """Bytes of one rank: persistent memory, and the additional peak of a forward and backward pass."""

    weights: int
    gradients: int
    optimizer: int
    activations: int


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live storages that operations allocate.

    ``copies_per_token``: copies that an MoE model makes of each token.
    """

    def __init__(self, copies_per_token: int = 1) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._copies = copies_per_token
        self._seen: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # called twice as often as all other operations together
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is _ATEN._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func is _ATEN.masked_select.default and isinstance(args[0], FakeTensor):
            experts, tokens = args[1].shape
            result = args[0].new_empty(tokens * min(self._copies, experts))
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, FakeTensor) and not tensor.is_sparse:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._seen:
            self._seen.add(storage)
            size = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Create a process group of ``size`` ranks with this process as ``rank``.

    Messages from other ranks are undefined.
    """
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run(
    spec: ModelSpec,
    layout: ParallelLayout,
    platform: Platform,
    options: BuildOptions,
    loss: Callable[[MegatronModel], LossFunction],
    microbatches: Sequence[Microbatch],
    add_optimizer: Callable[[MegatronModel], None],
) -> TracedBytes:
    """Trace this process's rank over ``microbatches``, inside a :func:`fake_world`.

    The microbatches are real host tensors.
    """
    platform.prepare_megatron()
    groups = build_groups(layout)
    assert groups is not None
    counted = LiveBytes(1 if spec.geometry.experts is None else spec.geometry.experts.per_token)
    # Weights are created on the final device and in the final dtype, because torch cannot convert modules of fake
    # tensors.
    unconverted = patch.object(torch.nn.Module, "_apply", lambda module, function, recurse=True: module)
    alike = patch.object(own_optimizer, "all_gather_json", lambda value, group: [value] * group.size())
    alone = patch.object(momentum, "all_gather_json", _of_this_rank)
    one_by_one = patch.object(param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: nullcontext(_Done()))
    as_on_gpu = patch.object(logprobs, "CACHE_BYTES", logprobs.SLICE_BYTES)
    scattered = patch.object(mappings, "_reduce_scatter_along_first_dim", _scatter)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        unconverted,
        alike,
        alone,
        one_by_one,
        as_on_gpu,
        scattered,
        counted,
    ):
        model = build_model(spec, groups, platform, options)
        buffers = [buffer for chunk in model.chunks for buffer in flat_buffers(chunk)]
        weights = sum(buffer.param_data.nbytes for buffer in buffers)
        gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
        add_optimizer(model)
        assert model.optimizer is not None
        state = sum(tensor.nbytes for tensor in model.optimizer.device_state())
        for chunk in model.chunks:
            _stand_in(chunk)
        before, counted.peak = counted.live, counted.live
        with patch.multiple(mlp, bias_swiglu_impl=_swiglu, weighted_bias_swiglu_impl=_weighted_swiglu):
            model.forward_backward(microbatches, loss(model))
        activations = counted.peak - before
        model.optimizer.megatron.get_grad_norm = lambda: 1.0  # a number instead of a fake tensor
        model.step(1e-6)
    return TracedBytes(weights, gradients, state, activations)


def flat_buffers(chunk: Any) -> list[Any]:
    """List Megatron's buffers of a trained chunk, including buffers for experts."""
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _of_this_rank(value: list[Any], group: dist.ProcessGroup) -> list[Any]:
    """Keep only this rank's part of a matrix. The other ranks get none."""
    return [value if rank == group.rank() else [] for rank in range(group.size())]


class _Done:
    """A handle of collectives that are complete."""

    def wait(self) -> None: ...


def _scatter(
    inputs: Tensor, group: dist.ProcessGroup, input_split_sizes: Sequence[int] | None = None, *args: Any
) -> Tensor:
    """Return a rank's rows without a copy, like NCCL.

    gloo has no such collective. The platform's replacement would copy the input.
    """
    if group.size() == 1:
        return inputs
    rows = len(inputs) // group.size() if input_split_sizes is None else input_split_sizes[group.rank()]
    return inputs.new_empty(rows, *inputs.shape[1:])


def _stand_in(chunk: torch.nn.Module) -> None:
    """Replace plain torch code by functions that save as much memory for the backward pass as the GPU kernels do."""
    for module in chunk.modules():
        if isinstance(module, mlp.MLP):  # experts have their own config
            module.config.bias_activation_fusion = module.activation_func is torch.nn.functional.silu
        if isinstance(module, RMSNorm):
            module.forward = partial(_norm, module.weight)  # type: ignore[method-assign]
        elif isinstance(module, SDPACoreAttention):
            module.forward = _attention  # type: ignore[method-assign]
        elif (dispatcher := getattr(module, "token_dispatcher", None)) is not None:
            dispatcher.preprocess = partial(_deal_evenly, dispatcher)


def _norm(weight: Tensor, x: Tensor) -> Tensor:
    result: Tensor = _Norm.apply(x, weight)
    return result


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = _Attention.apply(query, key, value)
    return result


def _swiglu(x: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    result: Tensor = _Swiglu.apply(x, None)
    return result


def _weighted_swiglu(x: Tensor, bias: Tensor | None, weights: Tensor, *args: Any) -> Tensor:
    result: Tensor = _Swiglu.apply(x, weights)
    return result


class _Swiglu(torch.autograd.Function):
    """A fused gated activation, times the router probabilities in MoE layers. It saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights)
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weights = ctx.saved_tensors
        return torch.empty_like(x), None if weights is None else torch.empty_like(weights)


class _Norm(torch.autograd.Function):
    """A fused norm. It saves its input and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Attention(torch.autograd.Function):
    """Flash attention over [s, b, heads, d].

    It saves queries, keys, values, the output, and one fp32 number per row and head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-2], query.shape[-2] * value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in ctx.saved_tensors[:3])


def _deal_evenly(dispatcher: MoEAlltoAllTokenDispatcher, routing_map: Tensor) -> NDArray[np.int64]:
    """Assign the same number of tokens to every expert, without counting."""
    tokens, experts = routing_map.shape
    copies = tokens * dispatcher.config.moe_router_topk
    share, local = copies // experts, dispatcher.num_local_experts
    ranks, tp = dispatcher.ep_size, dispatcher.tp_size
    dispatcher.num_out_tokens = copies
    for point in ("before_permutation_1", "before_ep_alltoall", "before_permutation_2", "before_finish"):
        dispatcher._maybe_update_cuda_sync_point(point)
    dispatcher.input_splits = np.full(ranks, share * local)
    dispatcher.output_splits = np.full(ranks, share * local)
    dispatcher.output_splits_tp = np.full(tp, share * local * ranks)
    dispatcher.num_global_tokens_per_local_expert = np.full((tp * ranks, local), share)
    return np.full(local, share * tp * ranks)
