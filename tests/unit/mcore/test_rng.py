from __future__ import annotations

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rlhf_mcore.mcore.rng import set_tracker_states, tracker_states
from rlhf_mcore.platform.cpu import CpuPlatform


def test_megatrons_generators_go_on_where_they_were() -> None:
    CpuPlatform().prepare_megatron()
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model", 3)

    def draw() -> list[float]:
        with tracker.fork("model"):
            return torch.rand(3).tolist()

    draw()
    states = {name: state.clone() for name, state in tracker_states().items()}
    assert set(states) == {"megatron.model"}
    expected = draw()
    assert draw() != expected
    set_tracker_states({**states, "torch.cpu": torch.zeros(1)})
    assert draw() == expected
    tracker.reset()
