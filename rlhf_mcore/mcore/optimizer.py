"""Megatron's distributed optimizer with fp32 master weights: updates, and access to its named state for checkpoints.

AdamW makes the steps, or an optimizer from ``momentum.py``.

The optimizer shards the flat gradient buffer of a model over data-parallel ranks. Shards do not respect parameter
boundaries. Here, a shard is therefore a list of element ranges, each within one local parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.utils import get_total_norm

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import OptimizerConfig, ScheduleConfig
from rlhf_mcore.geometry import LocalParameter, StateShard
from rlhf_mcore.masters import SplitMaster, rounds_to
from rlhf_mcore.mcore.groups import ModelGroups, use_groups
from rlhf_mcore.mcore.host_state import HostRange, HostSteps, choose_hosted, move_to_host
from rlhf_mcore.mcore.momentum import MatrixExchange, MomentumSteps, MuonRange
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.mcore.weights import adapter_parameters, local_parameters
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.platform import ModuleView, Platform
from rlhf_mcore.platform.megatron_versions import grads_of_norm
from rlhf_mcore.residency.ledger import OPTIMIZER, WEIGHTS
from rlhf_mcore.residency.sharing import Movable

if TYPE_CHECKING:
    from rlhf_mcore.mcore.momentum import Locate


# bf16 moments, and masters as 16-bit remainders. Transformer Engine's FusedAdam makes the steps.
_PRECISION_AWARE = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}


def check_state_dtype(cfg: OptimizerConfig, key: str) -> None:
    """Check that this machine can step the state. ``key`` names the settings in messages.

    Raises:
        ConfigError: bf16 state needs a kernel that is missing.
    """
    if cfg.state_dtype == "bf16" and "store_param_remainders" not in signature(megatron_optimizer.Adam).parameters:
        raise ConfigError(
            f"{key}.state_dtype=bf16 needs the FusedAdam of Transformer Engine 2.1 or later, which is not installed; set it to "
            f"fp32, and save memory with {key}.offload"
        )


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of one update, equal on every rank of the model.

    ``grad_norm`` is the norm before clipping, or NaN if the loss scaler found an overflow. ``finite`` is false if the
    gradient was NaN or infinite and no loss scaler handled it. ``norm_alone`` is the norm of the parameters that are
    clipped separately.
    """

    updated: bool
    grad_norm: float
    finite: bool = True
    norm_alone: float = math.nan


@dataclass(frozen=True, slots=True)
class _Hosted:
    """A range whose state is in host memory, with its Megatron optimizer and model parameter."""

    part: DistributedOptimizer
    param: Tensor
    range: HostRange


class Optimizer:
    """The optimizer of a model's chunks on this rank."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        groups: ModelGroups,
        platform: Platform,
        cfg: OptimizerConfig,
        overrides: Overrides | None = None,
        movable: Movable | None = None,
        locate: Locate = lambda *_: [],
        clips_alone: bool = False,
    ):
        """Create the optimizer. Collective over the model's ranks.

        Load the model's weights first, because the optimizer copies them to its master weights.

        ``locate`` finds the matrices that Muon needs whole. ``clips_alone``: some rank of the model holds parameters
        that are clipped by their own norm (``is_clipped_alone``).
        """
        self._chunks, self._groups, self._platform = chunks, groups, platform
        self._clips_alone = clips_alone
        self._movable = movable or Movable()
        settings = (overrides or Overrides()).build(
            megatron_optimizer.OptimizerConfig,
            optimizer="adam",
            lr=cfg.lr,
            min_lr=cfg.schedule.min_lr,
            weight_decay=cfg.weight_decay,
            adam_beta1=cfg.beta1,
            adam_beta2=cfg.beta2,
            adam_eps=cfg.eps,
            clip_grad=cfg.clip_grad,
            params_dtype=config.params_dtype,
            bf16=config.bf16,
            fp16=config.fp16,
            use_distributed_optimizer=True,
            initial_loss_scale=65536.0,
            min_loss_scale=1.0,
            loss_scale_window=1000,
            hysteresis=2,
            **(_PRECISION_AWARE if cfg.state_dtype == "bf16" else {}),
        )
        # Megatron's name of the gradient of a stepped tensor. A stepped bf16 weight may have an fp32 gradient.
        self._grad = "decoupled_grad" if settings.use_precision_aware_optimizer else "grad"
        # Megatron creates all masters on the device. Before they move, they use the memory of the gradients.
        resting = chunks if cfg.offload else ()
        for chunk in resting:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)  # type: ignore[operator]
        with use_groups(groups, platform), aligned_within(groups.collection.intra_dist_opt):
            self.megatron: MegatronOptimizer = megatron_optimizer.get_megatron_optimizer(
                settings, list(chunks), use_gloo_process_groups=False, pg_collection=groups.collection
            )
        for group in self.megatron.param_groups:
            # Megatron's own scheduler computes this product. Without it, norms and biases would be decayed too.
            group["weight_decay"] = cfg.weight_decay * group["wd_mult"]
        config.grad_scale_func = self.megatron.scale_loss
        self._reader: Future[None] | None = None
        self._hosted: list[_Hosted] = []
        self._host: HostSteps | None = None
        if cfg.offload:
            self._hosted = self._move_to_host(cfg.offload)
            self._host = HostSteps([one.range for one in self._hosted], platform)
            platform.empty_cache()
        for chunk in resting:
            chunk.restore_grad_buffers(synchronize=False)  # type: ignore[operator]
        self._momentum: MomentumSteps | None = None
        if cfg.name != "adamw":
            ranges = list(self._ranges_with_momentum(cfg.name, locate))
            kind = torch.float32 if config.params_dtype == torch.float32 else torch.bfloat16
            whole = groups.collection.intra_dist_opt
            exchange = MatrixExchange(ranges, whole, kind, platform.device()) if cfg.name == "muon" else None
            self._momentum = MomentumSteps(ranges, cfg.momentum, exchange)

    def read_in_thread(self, read: Callable[[], None]) -> Future[None]:
        """Run ``read`` in a thread to copy the state while the run continues.

        Changes wait for it (:meth:`wait_for_reader`).
        """
        self.wait_for_reader()
        self._reader = self._platform.in_thread(read)
        # Until then the state also stays on the device, with the weights that complete 16-bit remainders.
        for kind in (OPTIMIZER, WEIGHTS) if self._grad == "decoupled_grad" else (OPTIMIZER,):
            if (part := self._movable.parts.get(kind)) is not None:
                part.reader = self._reader
        return self._reader

    def wait_for_reader(self) -> None:
        """Wait until the state can be changed or moved."""
        if self._reader is not None:
            wait([self._reader])  # the caller of read_in_thread handles errors
            self._reader = None

    def step(self, lr: float) -> StepOutcome:
        """Make one update. If the gradient is not finite, change nothing. Collective over the model's ranks."""
        self.wait_for_reader()
        for group in self.megatron.param_groups:
            group["lr"] = lr
        with use_groups(self._groups, self._platform), torch.no_grad():
            try:
                return self._step()
            finally:
                for part in self._parts():
                    for parameter in part.get_parameters():
                        setattr(parameter, self._grad, None)  # for 16-bit gradients this may be an fp32 copy

    def _step(self) -> StepOutcome:
        for one in self._hosted:
            span = one.part._get_model_param_range_map(one.param)["param"]
            grad: Tensor = one.param.main_grad  # type: ignore[attr-defined]
            one.range.stepped.grad = grad.view(-1)[span.start : span.end].float()  # as Megatron does
        if self.megatron.prepare_grads():
            return StepOutcome(False, math.nan)
        norms = self._norms()
        if not all(map(math.isfinite, norms)):
            return StepOutcome(False, norms[0], finite=False)
        for part in self._parts():
            for parameters, norm in zip(self._split_by_clipping(part), norms, strict=True):
                if parameters and part.config.clip_grad > 0.0:
                    limit, is_decoupled = part.config.clip_grad, self._grad == "decoupled_grad"
                    clip_grad_by_total_norm_fp32(parameters, limit, norm, use_decoupled_grad=is_decoupled)
        if self._momentum is not None:
            self._momentum.step()
        if self._host is not None:
            self._host.step()
        updated = bool(self.megatron.step_with_ready_grads())
        return StepOutcome(updated, norms[0], norm_alone=norms[-1])

    def _norms(self) -> list[float]:
        """Compute one gradient norm per group of parameters that are clipped together.

        Collective over the model's ranks.
        """
        if not self._clips_alone:
            return [float(self.megatron.get_grad_norm())]
        counted: list[list[Tensor]] = [[], []]
        for part in self._parts():
            grads = grads_of_norm(part)
            for number, parameters in enumerate(self._split_by_clipping(part)):
                mine = {id(getattr(parameter, self._grad)) for parameter in parameters}
                counted[number] += [grad for grad in grads if id(grad) in mine]
        group = self._groups.collection.intra_dist_opt
        return [float(get_grad_norm_fp32(grads, grad_stats_parallel_group=group)) for grads in counted]

    def _split_by_clipping(self, part: DistributedOptimizer) -> list[list[Tensor]]:
        """Split the stepped tensors by clipping: one list of all, or [clipped together, clipped alone]."""
        if not self._clips_alone:
            return [part.get_parameters()]
        stepped = self._list_stepped(part)
        alone = {id(tensor) for param, tensor in stepped if getattr(param, "is_clipped_alone", False)}
        parts: list[list[Tensor]] = [[], []]
        for parameter in part.get_parameters():
            parts[id(parameter) in alone].append(parameter)
        return parts

    def _move_to_host(self, share: float) -> list[_Hosted]:
        """Move the state of a share of this rank's ranges to the host. Megatron no longer steps and copies them."""
        held = [(part, param, stepped) for part in self._parts() for param, stepped in _list_stepped(part)]
        groups, hosted = self._groups_of_stepped(), []
        for number in sorted(choose_hosted([len(stepped) for *_, stepped in held], share)):
            part, param, stepped = held[number]
            span = part._get_model_param_range_map(param)["param"]
            weights = param.detach().view(-1)[span.start : span.end]
            part.optimizer.state[stepped] = state = move_to_host(weights, stepped)
            hosted.append(_Hosted(part, param, HostRange(weights, stepped, groups[id(stepped)], state)))
        moved = {id(one.range.stepped) for one in hosted}
        for params, tensors in (pair for part in self._parts() for pair in _pairs_of_groups(part)):
            kept = [pair for pair in zip(params, tensors, strict=True) if id(pair[1]) not in moved]
            params[:], tensors[:] = [param for param, _ in kept], [stepped for _, stepped in kept]
        return hosted

    def _groups_of_stepped(self) -> dict[int, dict[str, Any]]:
        """Return the group of settings of each stepped tensor, by the tensor's id."""
        groups = (group for part in self._parts() for group in part.optimizer.param_groups)
        return {id(stepped): group for group in groups for stepped in group["params"]}

    def _ranges_with_momentum(self, name: str, locate: Locate) -> Iterator[MuonRange]:
        """Yield the ranges that this module steps: all with SGD, those within matrices with Muon."""
        groups = self._groups_of_stepped()
        for part, parameter, span, stepped in self._ranges():
            matrices = locate(parameter.name, parameter.shard, span.start, span.stop) if name == "muon" else []
            if matrices or name == "sgd":
                yield MuonRange(stepped, part.optimizer.state[stepped], groups[id(stepped)], matrices)

    def _ranges(self) -> Iterator[tuple[DistributedOptimizer, LocalParameter, range, Tensor]]:
        """Yield each range of elements that this rank steps.

        An item is the optimizer, the local parameter, the range, and the flat fp32 tensor of the range.
        """
        local = {_place(one.tensor): one for one in self._parameters()}
        for part in self._parts():
            for param, stepped in self._list_stepped(part):
                ranges = part._get_model_param_range_map(param)["param"]
                yield part, local[_place(param)], range(ranges.start, ranges.end), stepped

    def _list_stepped(self, part: DistributedOptimizer) -> list[tuple[Tensor, Tensor]]:
        """List (model parameter, stepped tensor of its range), on the device and in host memory."""
        return [*_list_stepped(part), *((one.param, one.range.stepped) for one in self._hosted if one.part is part)]

    def device_state(self) -> list[Tensor]:
        """List the tensors of the state that are not hosted. They are on the device, except while they are offloaded."""
        hosted = {id(one.range.stepped) for one in self._hosted}
        held = ((part, one.tensor, stepped) for part, one, _, stepped in self._ranges() if id(stepped) not in hosted)
        state = [
            tensor for part, param, stepped in held for tensor in _tensors(part.optimizer, param, stepped).values()
        ]
        return [tensor.remainders if isinstance(tensor, SplitMaster) else tensor for tensor in state]

    def shards(self) -> list[StateShard]:
        """Return views of this rank's part of the state.

        Offloaded and hosted state is viewed in host memory. With 16-bit parameters, ``master`` contains the fp32 weights
        that Adam steps. With fp32 parameters there is no ``master``, because Adam steps the parameters themselves.
        Moments that do not exist yet (before the first update) are created as zeros.
        """
        views = []
        for part, parameter, span, stepped in self._ranges():
            tensors = _tensors(part.optimizer, parameter.tensor, stepped)
            current = {kind: self._current(tensor) for kind, tensor in tensors.items()}
            views.append(StateShard(parameter.name, parameter.shard, span.start, span.stop, current))
        return views

    def _current(self, tensor: Tensor | SplitMaster) -> Tensor | SplitMaster:
        if isinstance(tensor, SplitMaster):
            return SplitMaster(*map(self._movable.current, (tensor.weights, tensor.remainders)))
        return self._movable.current(tensor)

    def is_finite(self) -> bool:
        """Return whether this rank's stepped weights, master weights and moments are all finite. Local.

        One fused pass computes a norm of the state, which is not finite if any element is not. The norm can also
        overflow. Every element is then checked.
        """
        weights = self._flat_weights()
        tensors = []
        for shard in self.shards():
            tensors.append(weights[shard.name][shard.start : shard.stop])
            # A split master is finite if its weight is.
            tensors += [tensor for tensor in shard.tensors.values() if isinstance(tensor, Tensor)]
        tensors = [tensor for tensor in tensors if tensor.numel()]
        return math.isfinite(get_total_norm(tensors)) or all(bool(tensor.isfinite().all()) for tensor in tensors)

    def unrounded_masters(self) -> list[str]:
        """Return the names of 16-bit parameters that differ on this rank from their rounded fp32 masters.

        Every update keeps them equal. After loading, equality proves that weights and state belong together.
        """
        local = self._flat_weights()
        names = []
        for shard in self.shards():
            if isinstance(master := shard.tensors.get("master"), Tensor):
                weights = local[shard.name][shard.start : shard.stop]
                if not rounds_to(master, weights.to(master.device)):
                    names.append(shard.name)
        return names

    def scalars(self) -> dict[str, Any]:
        """Return the number of Adam's updates and the state of the loss scaler, as plain JSON values.

        The state is None without a scaler. The numbers are equal on every rank, except that a rank without state has
        ``step`` 0.
        """
        parts = self._parts()
        steps = {int(step) for part in parts for step in _steps(part.optimizer)}
        assert len(steps) <= 1, f"parameters were stepped unequally often: {sorted(steps)}"
        scale = None
        if scalers := [part.grad_scaler for part in parts if part.grad_scaler is not None]:
            state = scalers[0].state_dict()
            scale = {name: value.item() if torch.is_tensor(value) else value for name, value in state.items()}
        return {"step": steps.pop() if steps else 0, "loss_scale": scale}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Restore the values from :func:`scalars`. Call :func:`shards` first to create the moments.

        If ``scalars`` come from a file, the caller must check them. Additional keys are ignored.
        """
        step, scale = scalars["step"], scalars["loss_scale"]
        for part in self._parts():
            for state in part.optimizer.state.values():
                if "step" in state:
                    state["step"] = torch.full_like(state["step"], step)
            for group in part.optimizer.param_groups:
                if "step" in group or not _counts_per_parameter(part.optimizer):
                    group["step"] = step
            if (scaler := part.grad_scaler) is not None and scale is not None:
                scaler._scale = torch.full_like(scaler.state_dict()["scale"], scale["scale"])
                scaler._growth_tracker = scale["growth_tracker"]
                scaler._hysteresis_tracker = scale["hysteresis_tracker"]

    def _flat_weights(self) -> dict[str, Tensor]:
        """Return the weights by name, on the device or offloaded."""
        return {one.name: self._movable.current(one.tensor).view(-1) for one in self._parameters()}

    def _parameters(self) -> list[LocalParameter]:
        layout = self._groups.layout
        return [*local_parameters(self._chunks, layout), *adapter_parameters(self._chunks, layout)]

    def _parts(self) -> list[DistributedOptimizer]:
        """List the optimizers that have parameters on this rank. Experts have a separate optimizer."""
        parts = getattr(self.megatron, "chained_optimizers", [self.megatron])
        assert all(isinstance(part, DistributedOptimizer) for part in parts)
        return [part for part in parts if not part.is_stub_optimizer]


@contextmanager
def aligned_within(group: dist.ProcessGroup) -> Iterator[None]:
    """Align parameter groups over the model's ranks. Megatron would do this over the whole world, with pickles.

    Only Megatron's optimizer module sees the replaced collectives, and only within this block.
    """

    def tuples(value: Any) -> Any:
        """Convert the lists that JSON made from tuples back to tuples."""
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    def gather(output: list[Any], keys: list[Any]) -> None:
        output[:] = [tuples(part) for part in all_gather_json(keys, group)]

    before = megatron_optimizer.torch
    collectives = ModuleView(before.distributed, {"all_gather_object": gather, "get_world_size": group.size})
    megatron_optimizer.torch = ModuleView(before, {"distributed": collectives})
    try:
        yield
    finally:
        megatron_optimizer.torch = before


def _place(tensor: Tensor) -> tuple[int, int]:
    """Identify a parameter by its storage, even while the storage has no memory."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _list_stepped(part: DistributedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (model parameter, flat tensor of its range that Adam steps)."""
    for params, tensors in _pairs_of_groups(part):
        yield from zip(params, tensors, strict=True)


def _pairs_of_groups(part: DistributedOptimizer) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield Megatron's lists (model parameters, stepped tensors) of each group of parameters."""
    is_split = part.config.use_precision_aware_optimizer
    stepped = part.shard_float16_groups if is_split else part.shard_fp32_from_float16_groups
    yield from zip(part.model_float16_groups, stepped, strict=True)
    yield from zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True)


def _tensors(adam: torch.optim.Optimizer, param: Tensor, stepped: Tensor) -> dict[str, Tensor | SplitMaster]:
    state = adam.state[stepped]
    is_split = stepped.dtype == torch.bfloat16
    if not state and getattr(adam, "use_decoupled_grad", False):
        adam.initialize_state(stepped, store_param_remainders=is_split)  # type: ignore[attr-defined]
    if not state.keys() & {"exp_avg", "momentum"}:
        if _counts_per_parameter(adam):
            state["step"] = torch.zeros((), dtype=torch.float32)  # like torch's Adam
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(stepped), torch.zeros_like(stepped)
    tensors = {kind: state[kind] for kind in ("exp_avg", "exp_avg_sq", "momentum") if kind in state}
    if is_split:
        tensors["master"] = SplitMaster(stepped.detach(), state["master_param"])
    elif param.dtype != torch.float32:
        tensors["master"] = state.get("master", stepped.detach())
    return tensors


def _counts_per_parameter(adam: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer counts steps per parameter, like torch's Adam.

    The fused optimizers of Transformer Engine and apex count per group.
    """
    return isinstance(adam, torch.optim.Adam)


def _steps(adam: torch.optim.Optimizer) -> list[Any]:
    if _counts_per_parameter(adam):
        return [state["step"] for state in adam.state.values() if "step" in state]
    return [group["step"] for group in adam.param_groups if group["params"] and "step" in group]


def learning_rate(update: int, peak: float, cfg: ScheduleConfig) -> float:
    """Return the rate of an update: linear warm-up to ``peak``, then constant, linear or cosine to ``min_lr``.

    Updates are counted from 0. In a warm-up of w updates, the first update uses peak / w and the w-th uses the peak.
    The last of ``total_updates`` uses ``min_lr``.
    """
    if update < cfg.warmup:
        return peak * (update + 1) / cfg.warmup
    if cfg.name == "constant":
        return peak
    assert cfg.total_updates is not None, "resolved by config.validate"
    span = max(cfg.total_updates - 1 - cfg.warmup, 1)
    progress = min((update - cfg.warmup) / span, 1.0)
    shape = 1.0 - progress if cfg.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.min_lr + (peak - cfg.min_lr) * shape
