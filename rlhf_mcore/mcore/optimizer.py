"""Megatron's distributed AdamW with fp32 master weights, and the learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer

from rlhf_mcore.config.schema import OptimizerConfig, ScheduleConfig
from rlhf_mcore.mcore.ambient import ambient
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.collectives import all_gather_json


def build_optimizer(model: MegatronModel, cfg: OptimizerConfig) -> MegatronOptimizer:
    """Collective over the model's ranks. The model's weights must be loaded: master weights are copied from them."""
    scale = cfg.loss_scale
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=cfg.lr,
        min_lr=cfg.schedule.min_lr,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.beta1,
        adam_beta2=cfg.beta2,
        adam_eps=cfg.eps,
        clip_grad=cfg.clip_grad,
        params_dtype=model.config.params_dtype,
        bf16=model.config.bf16,
        fp16=model.config.fp16,
        use_distributed_optimizer=True,
        initial_loss_scale=scale.initial,
        min_loss_scale=scale.minimum,
        loss_scale_window=scale.growth_interval,
        hysteresis=scale.hysteresis,
    )
    with ambient(model.groups, model.platform), _aligned_within(model.groups.collection.intra_dist_opt):
        optimizer = get_megatron_optimizer(
            config, list(model.chunks), use_gloo_process_groups=False, pg_collection=model.groups.collection
        )
    for group in optimizer.param_groups:
        # Megatron leaves this product to its own scheduler; without it norms and biases would be decayed too.
        group["weight_decay"] = cfg.weight_decay * group["wd_mult"]
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


@contextmanager
def _aligned_within(group: dist.ProcessGroup) -> Iterator[None]:
    """Parameter groups are aligned over the ranks of the model: Megatron would do it over the whole world, and by pickles."""

    def gather(found: list[Any], keys: list[Any]) -> None:
        found[:] = [_tuples(part) for part in all_gather_json(keys, group)]

    replaced = {"all_gather_object": gather, "get_world_size": lambda of=None: (of or group).size()}
    before = {name: getattr(dist, name) for name in replaced}
    for name, function in replaced.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _tuples(value: Any) -> Any:
    """Lists that JSON has made of tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Of one update, the same on every rank of the model.

    ``grad_norm`` is that before clipping, NaN when the loss scaler found an overflow. ``finite`` is false when the gradient was NaN or
    infinite without a loss scaler having asked for it.
    """

    updated: bool
    grad_norm: float
    finite: bool = True


def optimizer_step(model: MegatronModel, optimizer: MegatronOptimizer, lr: float) -> StepOutcome:
    """One update, unless the gradient is not finite: then nothing is changed. Collective over the model's ranks."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    with ambient(model.groups, model.platform), torch.no_grad():
        if optimizer.prepare_grads():
            return StepOutcome(False, math.nan)
        grad_norm = float(optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            return StepOutcome(False, grad_norm, finite=False)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            parameters = [] if part.is_stub_optimizer else part.get_parameters()
            if parameters and part.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=grad_norm)
        return StepOutcome(bool(optimizer.step_with_ready_grads()), grad_norm)


def learning_rate(update: int, peak: float, cfg: ScheduleConfig) -> float:
    """Rate of update ``update`` (counted from 0): linear warm-up to ``peak``, then constant, linear or cosine down to ``min_lr``.

    The first update of a warm-up of w updates has peak / w, the w-th has the peak; the last of ``total_updates`` has ``min_lr``.
    """
    if update < cfg.warmup_updates:
        return peak * (update + 1) / cfg.warmup_updates
    if cfg.name == "constant":
        return peak
    assert cfg.total_updates is not None, "resolved by config.validate"
    span = max(cfg.total_updates - 1 - cfg.warmup_updates, 1)
    progress = min((update - cfg.warmup_updates) / span, 1.0)
    shape = 1.0 - progress if cfg.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.min_lr + (peak - cfg.min_lr) * shape
