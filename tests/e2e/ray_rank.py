"""A rank that scores with workers under the Ray of its machine. test_ray_rewards.py starts it like torchrun."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from rlhf_mcore.cli.reward_pools import reward_pools
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.reward import build_reward, make_text_trajectory
from rlhf_mcore.types import Prompt


def main(function: str) -> None:
    """Print the scores of three responses and the address of Ray."""
    dist.init_process_group("gloo")
    cfg = RewardConfig(function=function, pool="ray", workers=1)
    reward = build_reward(cfg, reward_pools(cfg))
    import ray  # Ray reads its settings at import, so import it only after joining

    rows = [make_text_trajectory(Prompt(str(n), n, [1], ""), "x" * n) for n in range(3)]
    print(
        json.dumps([[score.value for score in run(reward.score(rows))], ray.get_runtime_context().gcs_address]),
        flush=True,
    )
    dist.barrier()  # Ray ends with the first rank
    reward.close()


if __name__ == "__main__":
    main(sys.argv[1])
