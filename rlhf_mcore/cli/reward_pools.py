"""Start the workers that score the responses of a run, on the machine of each rank or with Ray."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rlhf_mcore.config.choices import ROLLOUT
from rlhf_mcore.config.schema import Config, RewardConfig
from rlhf_mcore.data.images import ImageStore
from rlhf_mcore.protocols import RewardFunction
from rlhf_mcore.rewards.pool import Pools, local_pool
from rlhf_mcore.rewards.ray_pool import RayPools
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.rollout.remote.cluster import TOKEN_VARIABLE, Cluster
from rlhf_mcore.rollout.remote.head import SETTINGS

KEY = "reward.pool"


def build_graders(cfg: Config, pools: Pools = local_pool) -> RewardFunction:
    """Build the reward function of a run, without a reward model. ``pools`` creates the workers of graders.

    Raises:
        ConfigError: a value of ``reward`` is invalid; the message names its key.
    """
    images = None
    if cfg.reward.judge.images:
        images = ImageStore.of(cfg.run_directory, cfg.model.path, cfg.data.image_pixels).directory
    build = partial(build_reward, cfg.reward, pools, validated=True, images=images)
    if cfg.environment.function is None:
        return build()
    if cfg.environment.function == ROLLOUT:
        from rlhf_mcore.environments.function import ReturnedReward

        return ReturnedReward(build())
    from rlhf_mcore.environments.environment import EnvironmentReward

    score = cfg.environment.score
    return EnvironmentReward(None if score == "environment" else build(), adds=score == "sum")


def reward_pools(cfg: RewardConfig) -> Pools:
    """Choose how this rank's workers are created. Collective over the world, if torch.distributed is initialised.

    Without an address, the first rank of each machine starts Ray, and the other ranks of the machine join it.

    Raises:
        ConfigError: no Ray runs at the address; raised on every rank.
    """
    if cfg.pool == "local":
        return local_pool  # torch is not imported, so that a reward server starts at once
    import torch.distributed as dist

    from rlhf_mcore.parallel.collectives import all_gather_json, on_every_rank

    def connect(address: str | None) -> Cluster:
        cluster = Cluster(address, 1, key=KEY)
        with ThreadPoolExecutor(1) as thread:  # on the main thread Ray would set signal handlers
            thread.submit(cluster.connect).result()
        return cluster

    if not dist.is_initialized():
        return RayPools(connect(cfg.ray_address).problem, cfg.ray.cpus_per_worker)
    starts = cfg.ray_address is None and os.environ.get("LOCAL_RANK", "0") == "0"
    own = on_every_rank(lambda: connect(None) if starts else None)
    machine = os.environ.get("GROUP_RANK", "0")
    addresses = all_gather_json([machine, own.joined, os.environ[TOKEN_VARIABLE]] if own is not None else [])
    address = cfg.ray_address
    if own is None and address is None:
        os.environ.update(SETTINGS)  # the first rank has started Ray with these settings, on the loopback
        address, os.environ[TOKEN_VARIABLE] = next(entry[1:] for entry in addresses if entry[:1] == [machine])
    cluster = on_every_rank(lambda: own or connect(address))
    return RayPools(cluster.problem, cfg.ray.cpus_per_worker)
