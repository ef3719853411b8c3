"""What Megatron's distributed optimizer keeps on this rank, named and placed, ready to be saved and to be filled in place.

The optimizer cuts the flat buffer of a model's gradients over data-parallel ranks without regard to the borders of parameters; here
every cut is said as a range of elements of one local parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor
from torch.nn.utils import get_total_norm

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.mcore.model import MegatronModel, local_parameters
from rlhf_mcore.types import StateShard

_REMEDY = "choose another checkpoint"


def optimizer_shards(model: MegatronModel, optimizer: MegatronOptimizer) -> list[StateShard]:
    """Live views of this rank's part of the optimizer's state.

    With 16-bit parameters the fp32 weights that Adam steps are ``master``. With fp32 parameters Adam steps the parameters
    themselves, so there is no ``master``. Moments that do not exist yet (before the first update) are made, as zeros.
    """
    local = {parameter.tensor.data_ptr(): parameter for parameter in local_parameters(model)}
    found = []
    for part in _parts(optimizer):
        for param, stepped in _stepped(part):
            held = part._get_model_param_range_map(param)["param"]
            parameter = local[param.data_ptr()]
            found.append(
                StateShard(
                    parameter.name, parameter.shard, held.start, held.end, _tensors(part.optimizer, param, stepped)
                )
            )
    return found


def state_is_finite(model: MegatronModel, optimizer: MegatronOptimizer) -> bool:
    """Whether the weights that this rank's optimizer steps, their masters and their moments hold no NaN and no infinity. Local.

    One fused pass over the state: a norm is not finite if an element is not. A norm may also overflow, so what it suspects is looked
    at element by element.
    """
    weights = {parameter.name: parameter.tensor.view(-1) for parameter in local_parameters(model)}
    tensors = []
    for shard in optimizer_shards(model, optimizer):
        tensors += [weights[shard.name][shard.start : shard.stop], *shard.tensors.values()]
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if math.isfinite(get_total_norm(tensors)):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def optimizer_scalars(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """The number of updates that Adam has made, and the state of the loss scaler (null without one). Plain JSON values.

    Numbers are the same on every rank; a rank that holds no state has ``step`` 0.
    """
    steps = {int(step) for part in _parts(optimizer) for step in _steps(part.optimizer)}
    assert len(steps) <= 1, f"parameters were stepped unequally often: {sorted(steps)}"
    return {"step": steps.pop() if steps else 0, "loss_scale": _scaler_state(optimizer)}


def load_optimizer_scalars(optimizer: MegatronOptimizer, scalars: Mapping[str, Any]) -> None:
    """Set what :func:`optimizer_scalars` has read. The moments must have been made (:func:`optimizer_shards`).

    Raises:
        ConfigError: they are not what that function returns.
    """
    if scalars.keys() != {"step", "loss_scale"}:
        raise ConfigError(f"the optimizer's state has scalars {dict(scalars)}, expected step and loss_scale; {_REMEDY}")
    if type(scalars["step"]) is not int or scalars["step"] < 0:
        raise ConfigError(
            f"the optimizer's state has step={scalars['step']!r}, which is no count of updates; {_REMEDY}"
        )
    _check_scaler(scalars["loss_scale"])
    for part in _parts(optimizer):
        for _, stepped in _stepped(part):
            state = part.optimizer.state[stepped]
            if "step" in state:
                state["step"] = torch.full_like(state["step"], scalars["step"])
        for group in part.optimizer.param_groups:
            if "step" in group or not _counts_per_parameter(part.optimizer):
                group["step"] = int(scalars["step"])
        if part.grad_scaler is not None and scalars["loss_scale"] is not None:
            _load_scaler(part.grad_scaler, scalars["loss_scale"])


def unrounded_masters(model: MegatronModel, optimizer: MegatronOptimizer) -> list[str]:
    """Names of 16-bit parameters of which some element on this rank is not its fp32 master, rounded.

    The optimizer keeps it so after every update; after loading, it shows that weights and state belong together.
    """
    local = {parameter.name: parameter.tensor.view(-1) for parameter in local_parameters(model)}
    return [
        shard.name
        for shard in optimizer_shards(model, optimizer)
        if "master" in shard.tensors
        and not _rounds_to(shard.tensors["master"], local[shard.name][shard.start : shard.stop])
    ]


def _rounds_to(master: Tensor, weights: Tensor) -> bool:
    return torch.equal(master.to(weights.dtype), weights)


def _parts(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """Experts have an optimizer of their own, beside that of the rest. One without parameters on this rank is left out."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    assert all(isinstance(part, DistributedOptimizer) for part in parts)
    return [part for part in parts if not part.is_stub_optimizer]


def _stepped(part: DistributedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter of the model, the flat fp32 tensor of its range that Adam steps)."""
    pairs = (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    )
    for models, shards in pairs:
        for params, tensors in zip(models, shards, strict=True):
            yield from zip(params, tensors, strict=True)


def _tensors(adam: torch.optim.Optimizer, param: Tensor, stepped: Tensor) -> dict[str, Tensor]:
    state = adam.state[stepped]
    if "exp_avg" not in state:
        if _counts_per_parameter(adam):
            state["step"] = torch.zeros((), dtype=torch.float32)  # as torch's Adam makes it
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(stepped), torch.zeros_like(stepped)
    tensors = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    if param.dtype != torch.float32:
        tensors["master"] = stepped.detach()
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    return tensors


def _counts_per_parameter(adam: torch.optim.Optimizer) -> bool:
    """torch's Adam counts its steps in the state of each parameter, the fused ones of Transformer Engine and apex by group."""
    return isinstance(adam, torch.optim.Adam)


def _steps(adam: torch.optim.Optimizer) -> list[Any]:
    if _counts_per_parameter(adam):
        return [state["step"] for state in adam.state.values() if "step" in state]
    return [group["step"] for group in adam.param_groups if group["params"] and "step" in group]


def _scaler_state(optimizer: MegatronOptimizer) -> dict[str, Any] | None:
    scalers = [part.grad_scaler for part in _parts(optimizer) if part.grad_scaler is not None]
    if not scalers:
        return None
    state = scalers[0].state_dict()
    return {name: value.item() if torch.is_tensor(value) else value for name, value in state.items()}


def _check_scaler(state: Any) -> None:
    if state is None:
        return
    counts = ("growth_tracker", "hysteresis_tracker")
    if not isinstance(state, Mapping) or state.keys() != {"scale", *counts}:
        raise ConfigError(
            f"the optimizer's state has loss_scale={state!r}, expected scale, {' and '.join(counts)}; {_REMEDY}"
        )
    scale = state["scale"]
    if not isinstance(scale, int | float) or not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"the optimizer's state has a loss scale of {scale!r}, not a positive number; {_REMEDY}")
    if any(type(state[name]) is not int for name in counts):
        raise ConfigError(
            f"the optimizer's state has loss_scale={dict(state)}, whose trackers are no counts; {_REMEDY}"
        )


def _load_scaler(scaler: Any, state: Mapping[str, Any]) -> None:
    scale = scaler.state_dict()["scale"]
    scaler._scale = torch.full_like(scale, state["scale"])
    scaler._growth_tracker = int(state["growth_tracker"])
    scaler._hysteresis_tracker = int(state["hysteresis_tracker"])
