"""Engines in processes of their own, under Ray. The only package that imports ray for them, and that lazily."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.platform import current_platform
from rlhf_mcore.rollout.remote.cluster import Cluster
from rlhf_mcore.rollout.remote.fleet import Fleet, FleetPlan
from rlhf_mcore.rollout.remote.host import EngineOrder

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.protocols import WeightReceiver, WeightTarget
    from rlhf_mcore.rollout.engine import EngineModel

__all__ = ["Fleet", "build_fleet"]


def build_fleet(
    cfg: RolloutConfig,
    model: EngineModel,
    receiver: Callable[[WeightTarget], WeightReceiver],
    note: Callable[[str], None],
) -> Fleet:
    """The engines of a run, which begin to start in the background. On the first rank alone.

    Args:
        cfg: resolved.
        receiver: makes the engine's end of the bridge in the engine's process; a class or function of a module.
        note: is told, on the thread that calls the fleet, when an engine has failed or left.

    Raises:
        ConfigError: engines on this machine find no device beside the trainer's.
    """
    on_cuda, needed = current_platform().name == "cuda", cfg.num_engines * cfg.layout.tp
    own = free_devices(os.environ, needed) if on_cuda and cfg.ray.address is None else ()
    cluster = Cluster(cfg.ray.address, cfg.ray.cpus_per_rank, int(on_cuda), own)
    plan = FleetPlan(
        EngineOrder(cfg, model, receiver),
        cfg.num_engines,
        cfg.layout.tp,
        cfg.ray.cpus_per_rank,
        cfg.engine_timeout_s,
        cfg.engine_restarts,
    )
    fleet = Fleet(cluster, plan, note)
    fleet.start()
    return fleet


def free_devices(environment: os._Environ[str] | dict[str, str], needed: int) -> Sequence[str]:
    """The GPUs of this machine that no rank of the trainer uses, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ConfigError: there are fewer than ``needed``.
    """
    import torch

    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))  # rank n of a machine uses its n-th device
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if len(names) - ranks < needed:
        raise ConfigError(
            f"rollout.num_engines: engines need {needed} GPUs of their own, and beside {ranks} of the trainer this machine has "
            f"{max(len(names) - ranks, 0)}; lower rollout.num_engines, rollout.layout.tp or trainer.world_size, or give "
            "rollout.ray.address of a cluster that has them"
        )
    return names[ranks:]
