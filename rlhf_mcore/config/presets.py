"""What ``algorithm.preset`` sets in the group ``algorithm``: for each algorithm the choices of its paper."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), eq. 3-4: group-normalised advantage, mean per sequence, k3 KL
    # in the loss.
    "grpo": {"advantage": "grpo", "normalize_std": True, "loss_aggregation": "sequence"},
    # Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783): no std, constant length.
    "dr_grpo": {"advantage": "grpo", "normalize_std": False, "loss_aggregation": "constant"},
    # Schulman et al. 2017 (arXiv 1707.06347) with GAE (arXiv 1506.02438), as Ouyang et al. 2022, InstructGPT (arXiv 2203.02155)
    # use it: KL in the reward.
    "ppo": {
        "advantage": "gae",
        "gamma": 1.0,
        "lam": 0.95,
        "whiten_advantages": True,
        "loss_aggregation": "token",
        "kl.estimator": "k1",
        "kl.placement": "reward",
    },
    # Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740): the log-likelihood of a response is a sum over its tokens.
    "rloo": {"advantage": "rloo", "loss_aggregation": "constant", "kl.estimator": "k1", "kl.placement": "reward"},
    # Hu et al. 2025, REINFORCE++ (arXiv 2501.03262).
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus",
        "loss_aggregation": "token",
        "kl.estimator": "k1",
        "kl.placement": "reward",
    },
    "reinforce_plus_plus_baseline": {
        "advantage": "reinforce_plus_plus_baseline",
        "loss_aggregation": "token",
        "kl.estimator": "k2",
        "kl.placement": "loss",
    },
    # Zheng et al. 2025 (arXiv 2507.18071), clip ranges of section 5.1.
    "gspo": {
        "advantage": "grpo",
        "policy_loss": "gspo",
        "loss_aggregation": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # MiniMax 2025, MiniMax-M1 (arXiv 2506.13585), eq. 4-5: no lower bound. The paper does not give its upper one.
    "cispo": {
        "advantage": "grpo",
        "policy_loss": "cispo",
        "loss_aggregation": "token",
        "clip_low": 1.0,
        "clip_high": 4.0,
    },
    # Yu et al. 2025, DAPO (arXiv 2503.14476): clip-higher, dynamic sampling, token-level loss, overlong shaping.
    "dapo": {
        "advantage": "grpo",
        "loss_aggregation": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dynamic_sampling.enabled": True,
        "overlong.enabled": True,
    },
    # Not reinforcement learning: the likelihood of given responses, and Bradley and Terry 1952 over pairs of them.
    "sft": {"kind": "sft", "loss_aggregation": "token"},
    "reward_model": {"kind": "reward_model"},
}
