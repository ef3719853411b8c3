"""Activations against sums written out by hand for one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.activations import forward_activations, head_bytes, training_activations
from rlhf_mcore.planning.inputs import Assumptions, PlannedRole
from rlhf_mcore.types import ModelGeometry

DENSE = ModelGeometry("llama", 8, 64, 4, 2, 16, 192, 1000, False)
EXPERTS = replace(DENSE, family="mixtral", num_experts=8, expert_ffn_size=96, experts_per_token=2)
EVEN = Assumptions(expert_imbalance=1.0)
# A token of a layer in bf16: norms 4 h; q, k, v (64 + 2 * 32), rotated q and k (96), output 64; a fused MLP; 4 fp32 numbers.
LAYER = 2 * (4 * 64) + 2 * (128 + 96 + 64) + 2 * 3 * 192 + 4 * 4
BACKWARD = 2 * (
    3 * 192 + 64
)  # beside them while one MLP is gone through backwards: three gradients, and its whole input


def role(layout: ParallelLayout, geometry: ModelGeometry = DENSE, **changes: Any) -> PlannedRole:
    return PlannedRole("actor", geometry, layout, True, **changes)


def layers(made: PlannedRole, pp: int, num_microbatches: int) -> float:
    """Bytes a token of all that training keeps in layers."""
    return training_activations(made, pp, 100, num_microbatches, 2, EVEN).layers / 100


def test_all_layers_of_one_rank() -> None:
    assert layers(role(ParallelLayout(1)), 0, 5) == 8 * LAYER + BACKWARD


def test_sequence_parallelism_divides_what_tensor_parallelism_does_not() -> None:
    inside, outside = LAYER - 2 * 4 * 64, 2 * 4 * 64
    assert layers(role(ParallelLayout(4, tp=4)), 0, 1) == 8 * (outside + inside / 4) + 2 * (3 * 192 / 4 + 64)
    assert layers(role(ParallelLayout(4, tp=4, sequence_parallel=True)), 0, 1) == 8 * LAYER / 4 + 2 * (3 * 192 / 4 + 64)


@pytest.mark.parametrize(("pp", "expected"), [(0, 4), (1, 3), (3, 1)])
def test_early_stages_keep_more_microbatches(pp: int, expected: int) -> None:
    made = role(ParallelLayout(4, pp=4))
    assert layers(made, pp, 16) == expected * 2 * LAYER + BACKWARD
    assert layers(made, pp, 1) == 2 * LAYER + BACKWARD


def test_interleaving_keeps_a_little_more() -> None:
    # Korthikanti et al. 2022, section 4.2.3: the first stage keeps 1 + (p - 1) / (p v) times what it would without.
    plain = layers(role(ParallelLayout(4, pp=4)), 0, 16)
    interleaved = layers(role(ParallelLayout(4, pp=4, vpp=2)), 0, 16)
    assert (interleaved - BACKWARD) / (plain - BACKWARD) == pytest.approx(1 + 3 / 8)


def test_full_recomputation_keeps_inputs_and_one_layer() -> None:
    full = role(ParallelLayout(1), recompute=RecomputeConfig("full", "uniform", 1))
    assert layers(full, 0, 1) == 8 * 2 * 64 + LAYER + BACKWARD
    pairs = role(ParallelLayout(1), recompute=RecomputeConfig("full", "uniform", 2))
    assert layers(pairs, 0, 1) == 4 * 2 * 64 + 2 * LAYER + BACKWARD
    block = role(ParallelLayout(1), recompute=RecomputeConfig("full", "block", 3))
    assert layers(block, 0, 1) == 3 * 2 * 64 + 5 * LAYER + LAYER + BACKWARD


def test_experts_see_a_copy_of_a_token_for_each_choice() -> None:
    mixture = 2 * 2 * (2 * 64 + 4 * 96) + 2 * 4 * 8  # two copies in, out and through the gated MLP; the router in fp32
    assert layers(role(ParallelLayout(1), EXPERTS), 0, 1) == 8 * (LAYER - 2 * 3 * 192 + mixture) + BACKWARD


def test_a_shared_expert_is_a_gated_mlp_whose_output_is_gated() -> None:
    routed, shared = EXPERTS, replace(EXPERTS, family="qwen2_moe", shared_expert_ffn_size=48)
    more = layers(role(ParallelLayout(1), shared), 0, 1) - layers(role(ParallelLayout(1), routed), 0, 1)
    assert more == 8 * 2 * (4 * 48 + 2 * 64)  # four halves, the output, and the output times its gate


def test_a_forward_pass_keeps_one_layer() -> None:
    assert forward_activations(role(ParallelLayout(1)), 0, 100, 2, EVEN).layers == 100 * LAYER


def test_logits_are_the_last_stages() -> None:
    made = role(ParallelLayout(4, tp=2, pp=2))
    assert head_bytes(made, 0, 100, 2, training=True) == 0
    # The final norm, logits and their gradient in bf16, four fp32 chunks (of 100 rows, fewer than a chunk has).
    expected = 2 * 2 * 100 * 64 + 2 * 2 * 100 * 500 + 4 * 4 * 100 * 500
    assert head_bytes(made, 1, 100, 2, training=True) == expected
    value = role(ParallelLayout(4, tp=2, pp=2), replace(DENSE, head="token"))
    assert head_bytes(value, 1, 100, 2, training=True) == 2 * 2 * 100 * 64 + 2 * 4 * 100
