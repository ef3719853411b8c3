"""Activations against sums written out by hand for one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.activations import forward_activations, head_bytes, training_activations
from rlhf_mcore.planning.inputs import Assumptions, PlannedRole

DENSE = ModelGeometry("llama", 8, 64, GroupedSizes(4, 2, 16), 192, 1000, False)
EXPERTS = replace(DENSE, family="mixtral", experts=ExpertSizes(8, 96, per_token=2))
EVEN = Assumptions(expert_imbalance=1.0)
ROTATION = 2 * 4 * 16  # cosines and sines of queries and of keys, on every tensor-parallel rank
# A token of a layer in bf16: norms 4 h; q, k, v (64 + 2 * 32), rotated q and k (96), output 64; a fused MLP; 4 fp32 numbers.
LAYER = 2 * (4 * 64) + 2 * (128 + 96 + 64) + 2 * 3 * 192 + 4 * 4 + ROTATION
BACKWARD = 2 * (
    64 + 2 * 192
)  # beside them while one MLP is gone through backwards: its whole input, and gradients of the halves
PASSED_ON = 2 * 2 * 64  # from the stage before, and back from the one behind
INPUT = 2 * 64  # of a microbatch, beside what is of its layers
MANY = 10**7  # tokens, beside which weights are nothing


def role(layout: ParallelLayout, geometry: ModelGeometry = DENSE, **changes: Any) -> PlannedRole:
    return PlannedRole("actor", replace(geometry, head="token"), layout, True, **changes)


def layers(made: PlannedRole, pp: int, num_microbatches: int, tokens: int = MANY) -> Any:
    """Bytes a token of all that training keeps in layers."""
    found = training_activations(made, pp, tokens, num_microbatches, 2, EVEN)
    assert found.logits == 0
    return pytest.approx(found.layers / tokens, rel=1e-5)


def test_all_layers_of_one_rank() -> None:
    assert layers(role(ParallelLayout(1)), 0, 5) == 8 * LAYER + INPUT + BACKWARD


def test_sequence_parallelism_divides_what_tensor_parallelism_does_not() -> None:
    outside = 2 * 4 * 64
    inside, backward = LAYER - outside - ROTATION, 2 * (64 + 2 * 192 / 4)
    assert layers(role(ParallelLayout(4, tp=4)), 0, 1) == 8 * (outside + ROTATION + inside / 4) + INPUT + backward
    shared = role(ParallelLayout(4, tp=4, sequence_parallel=True))
    assert layers(shared, 0, 1) == 8 * (ROTATION + (outside + inside) / 4) + INPUT / 4 + backward


def test_inputs_of_products_in_8_bits_are_kept_in_8_bits() -> None:
    element = 1 + 4 / 128  # a number, and a scale for 128 of them
    # Both norms' outputs and the MLP's product lose 2 bytes for these; attention keeps its output beside them.
    kept = LAYER + (element - 2) * (2 * 64 + 192) + element * 64
    assert layers(role(ParallelLayout(1), fp8=True), 0, 5) == 8 * kept + INPUT + BACKWARD
    mlp = role(ParallelLayout(1), fp8=True, recompute=RecomputeConfig("selective", modules=["mlp"]))
    plain = role(ParallelLayout(1), recompute=RecomputeConfig("selective", modules=["mlp"]))
    less = 8 * ((element - 2) * 2 * 64 + element * 64)  # of the MLP nothing is kept, in 8 bits or more
    assert layers(mlp, 0, 5) == pytest.approx(layers(plain, 0, 5).expected + less, rel=1e-5)


@pytest.mark.parametrize(("pp", "expected"), [(0, 4), (1, 3), (3, 1)])
def test_early_stages_keep_more_microbatches(pp: int, expected: int) -> None:
    made = role(ParallelLayout(4, pp=4))
    assert layers(made, pp, 16) == expected * (2 * LAYER + INPUT) + BACKWARD + PASSED_ON
    assert layers(made, pp, 1) == 2 * LAYER + INPUT + BACKWARD + PASSED_ON


def test_interleaving_keeps_a_little_more() -> None:
    # Korthikanti et al. 2022, section 4.2.3: the first stage keeps 1 + (p - 1) / (p v) times what it would without.
    beside = BACKWARD + PASSED_ON
    assert layers(role(ParallelLayout(4, pp=4)), 0, 16) == 4 * (2 * LAYER + INPUT) + beside
    assert layers(role(ParallelLayout(4, pp=4, vpp=2)), 0, 16) == 4 * (2 * LAYER + 2 * INPUT) * (1 + 3 / 8) + beside


def test_full_recomputation_keeps_inputs_and_one_layer() -> None:
    full = role(ParallelLayout(1), recompute=RecomputeConfig("full", "uniform", 1))
    assert layers(full, 0, 1) == 9 * 2 * 64 + LAYER + BACKWARD
    pairs = role(ParallelLayout(1), recompute=RecomputeConfig("full", "uniform", 2))
    assert layers(pairs, 0, 1) == 5 * 2 * 64 + 2 * LAYER + BACKWARD
    block = role(ParallelLayout(1), recompute=RecomputeConfig("full", "block", 3))
    assert layers(block, 0, 1) == 4 * 2 * 64 + 5 * LAYER + LAYER + BACKWARD


def test_selective_recomputation_keeps_the_named_parts_of_one_layer() -> None:
    selective = RecomputeConfig("selective", modules=["mlp", "core_attn"])
    assert (
        layers(role(ParallelLayout(1), recompute=selective), 0, 1)
        == 8 * LAYER - 7 * (2 * 3 * 192 + 4 * 4) + INPUT + BACKWARD
    )
    experts = role(ParallelLayout(1), EXPERTS, recompute=RecomputeConfig("selective", modules=["moe"]))
    assert layers(experts, 0, 1) == 8 * (LAYER - 2 * 3 * 192) + MIXTURE + INPUT + SENT


def test_with_few_tokens_it_is_the_gradients_of_weights_that_take_room() -> None:
    one = training_activations(role(ParallelLayout(4, pp=4)), 1, 1, 1, 2, EVEN)
    # Of both halves' weight, and of one token the input's; the halves have become their gradient and their product is free.
    assert one.layers == 2 * LAYER + INPUT + PASSED_ON + 2 * (2 * 64 * 192 + 64 - 192)
    first = training_activations(role(ParallelLayout(4, pp=4)), 0, 1, 1, 2, EVEN)
    assert first.layers == PASSED_ON + 2 * 64 * (1000 + 1)  # of the embedding, when the layers are done
    recomputed = role(ParallelLayout(4, pp=4), recompute=RecomputeConfig("full"))
    assert training_activations(recomputed, 0, 1, 1, 2, EVEN).layers == first.layers + 3 * 2 * 64


# Two copies in and through the gated MLP, each with a probability; the router in fp32.
MIXTURE = 2 * 2 * (64 + 3 * 96) + 4 * 2 + 2 * 4 * 8
SENT = (
    2 * 64 * (2 * 2 + 2 * 2)
)  # copies before and after they are sent, the experts' outputs, and these in their old order


def test_experts_see_a_copy_of_a_token_for_each_choice() -> None:
    assert layers(role(ParallelLayout(1), EXPERTS), 0, 1) == 8 * (LAYER - 2 * 3 * 192 + MIXTURE) + INPUT + SENT


def test_what_sharded_experts_make_is_summed_in_fp32() -> None:
    whole = role(ParallelLayout(4, tp=4, sequence_parallel=True, ep=2, etp=2), EXPERTS)
    attention = 8 * (ROTATION + (LAYER - ROTATION - 2 * 3 * 192) / 4)
    # A rank sees its own tokens' copies, half a one of each token, and those of another rank.
    mixture = 8 * (2 * (64 + 3 * 48) + 4 * 1 + 2 * 4 * 8 / 4)
    assert layers(whole, 0, 1) == attention + mixture + INPUT / 4 + 64 * (2 * (2 * 0.5 + 2 * 1) + 4 * (1 + 0.5))


def test_a_shared_expert_is_a_gated_mlp_whose_output_is_gated() -> None:
    shared = replace(EXPERTS, family="qwen2_moe", experts=ExpertSizes(8, 96, per_token=2, shared_ffn_size=48))
    more = 8 * 2 * (3 * 48 + 2 * 64)  # two halves, their product, the output, and the output times its gate
    assert layers(role(ParallelLayout(1), shared), 0, 1) == 8 * (LAYER - 2 * 3 * 192 + MIXTURE) + INPUT + SENT + more


def test_a_forward_pass_keeps_one_layer() -> None:
    assert forward_activations(role(ParallelLayout(1)), 0, 100, 2, EVEN).layers == 100 * LAYER
    assert forward_activations(role(ParallelLayout(1), EXPERTS), 0, 100, 2, EVEN).layers == 100 * (
        LAYER - 2 * 3 * 192 + MIXTURE + SENT
    )


def test_logits_are_the_last_stages_and_come_when_no_layer_computes() -> None:
    made = replace(role(ParallelLayout(4, tp=2, pp=2)), geometry=DENSE)
    assert head_bytes(made, 0, 100, 2, training=True) == 0
    # The final norm, hidden states in fp32 and bf16, four times fp32 logits (of 100 rows, fewer than a chunk has).
    expected = 2 * 2 * 100 * 64 + (4 + 2) * 100 * 64 + 4 * 4 * 100 * 500
    assert head_bytes(made, 1, 100, 2, training=True) == expected
    found = training_activations(made, 1, 100, 1, 2, EVEN)
    kept = 4 * ((LAYER - ROTATION - 2 * 4 * 64) / 2 + ROTATION + 2 * 4 * 64) + INPUT + PASSED_ON
    assert (found.layers, found.logits) == (100 * kept, expected)
    # Of one token the gradient of the weight is larger: beside it fp32 and bf16 logits, and that of the hidden state.
    one = 2 * 2 * 64 + (4 + 2) * 64 + (4 + 2) * 500 + 2 * 64 * (500 + 1)
    assert head_bytes(made, 1, 1, 2, training=True) == one
    value = role(ParallelLayout(4, tp=2, pp=2))
    assert head_bytes(value, 1, 100, 2, training=True) == 2 * 2 * 100 * 64 + 2 * 4 * 100
