"""Compare activation memory with sums written out by hand for one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import PlannedRole, Workload
from rlhf_mcore.planning.memory import Pass, forward_activations, head_bytes, training_activations

DENSE = ModelGeometry("llama", 8, 64, GroupedSizes(4, 2, 16), 192, 1000, False)
EXPERTS = replace(DENSE, family="mixtral", experts=ExpertSizes(8, 96, per_token=2))
ROTATION = 2 * 4 * 16  # cosines and sines of queries and keys, on every tensor-parallel rank
# Bytes per token of a layer in bf16: norms 4 h; q, k, v (64 + 2 * 32), rotated q and k (96), output 64; a fused MLP;
# 4 fp32 numbers.
LAYER = 2 * (4 * 64) + 2 * (128 + 96 + 64) + 2 * 3 * 192 + 4 * 4 + ROTATION
BACKWARD = 2 * (64 + 2 * 192)  # the backward pass of one MLP: its whole input, and gradients of the halves
PASSED_ON = 2 * 2 * 64  # received from the previous stage, and returned by the next
INPUT = 2 * 64  # per microbatch, in addition to its layers
MANY = 10**7  # tokens, with which weights are negligible


def role(layout: ParallelLayout, geometry: ModelGeometry = DENSE, **changes: Any) -> PlannedRole:
    return PlannedRole("actor", replace(geometry, head="token"), layout, True, **changes)


def layers(made: PlannedRole, pp: int, num_microbatches: int, tokens: int = MANY) -> Any:
    """Return the bytes per token that training keeps in layers."""
    found = training_activations(Pass(made, tokens), pp, num_microbatches)
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
    element = 1 + 4 / 128  # a number, and a scale per 128 numbers
    # Both norms' outputs and the MLP's product take 2 bytes less. Attention keeps its output in addition.
    kept = LAYER + (element - 2) * (2 * 64 + 192) + element * 64
    assert layers(role(ParallelLayout(1), fp8=True), 0, 5) == 8 * kept + INPUT + BACKWARD


@pytest.mark.parametrize(("pp", "expected"), [(0, 4), (1, 3), (3, 1)])
def test_early_stages_keep_more_microbatches(pp: int, expected: int) -> None:
    made = role(ParallelLayout(4, pp=4))
    assert layers(made, pp, 16) == expected * (2 * LAYER + INPUT) + BACKWARD + PASSED_ON
    assert layers(made, pp, 1) == 2 * LAYER + INPUT + BACKWARD + PASSED_ON


def test_interleaving_keeps_a_little_more() -> None:
    # Korthikanti et al. 2022, section 4.2.3: with interleaving, the first stage keeps 1 + (p - 1) / (p v) times as much.
    beside = BACKWARD + PASSED_ON
    assert layers(role(ParallelLayout(4, pp=4)), 0, 16) == 4 * (2 * LAYER + INPUT) + beside
    assert layers(role(ParallelLayout(4, pp=4, vpp=2)), 0, 16) == 4 * (2 * LAYER + 2 * INPUT) * (1 + 3 / 8) + beside


def test_full_recomputation_keeps_inputs_and_one_layer() -> None:
    full = role(ParallelLayout(1), recompute=RecomputeConfig(granularity="full", num_layers=1))
    assert layers(full, 0, 1) == 9 * 2 * 64 + LAYER + BACKWARD
    pairs = role(ParallelLayout(1), recompute=RecomputeConfig(granularity="full", num_layers=2))
    assert layers(pairs, 0, 1) == 5 * 2 * 64 + 2 * LAYER + BACKWARD
    block = role(ParallelLayout(1), recompute=RecomputeConfig(granularity="block", num_layers=3))
    assert layers(block, 0, 1) == 4 * 2 * 64 + 5 * LAYER + LAYER + BACKWARD


def test_an_activation_that_is_not_fused_is_kept() -> None:
    unfused = role(ParallelLayout(1), megatron={"bias_activation_fusion": False})
    assert layers(unfused, 0, 1) == 8 * (LAYER + 2 * 192) + INPUT + BACKWARD


def test_selective_recomputation_keeps_the_named_parts_of_one_layer() -> None:
    selective = RecomputeConfig(granularity="selective", modules=["mlp", "core_attn"])
    assert (
        layers(role(ParallelLayout(1), recompute=selective), 0, 1)
        == 8 * LAYER - 7 * (2 * 3 * 192 + 4 * 4) + INPUT + BACKWARD
    )
    experts = role(ParallelLayout(1), EXPERTS, recompute=RecomputeConfig(granularity="selective", modules=["moe"]))
    assert layers(experts, 0, 1) == 8 * (LAYER - 2 * 3 * 192) + MIXTURE + INPUT + SENT


# Two copies into and through the gated MLP, each with a probability, and the router in fp32.
MIXTURE = 2 * 2 * (64 + 3 * 96) + 4 * 2 + 2 * 4 * 8
SENT = (
    2 * 64 * (2 * 2 + 2 * 2)
)  # copies before and after the exchange, the experts' outputs, and these in their former order


def test_experts_see_a_copy_of_a_token_for_each_choice() -> None:
    assert layers(role(ParallelLayout(1), EXPERTS), 0, 1) == 8 * (LAYER - 2 * 3 * 192 + MIXTURE) + INPUT + SENT


def test_what_sharded_experts_make_is_summed_in_fp32() -> None:
    whole = role(ParallelLayout(4, tp=4, sequence_parallel=True, ep=2, etp=2), EXPERTS)
    attention = 8 * (ROTATION + (LAYER - ROTATION - 2 * 3 * 192) / 4)
    # A rank sees copies of its own tokens, half a copy per token, and copies of another rank's tokens.
    mixture = 8 * (2 * (64 + 3 * 48) + 4 * 1 + 2 * 4 * 8 / 4)
    assert layers(whole, 0, 1) == attention + mixture + INPUT / 4 + 64 * (2 * (2 * 0.5 + 2 * 1) + 4 * (1 + 0.5))


def test_a_shared_expert_is_a_gated_mlp_whose_output_is_gated() -> None:
    shared = replace(EXPERTS, family="qwen2_moe", experts=ExpertSizes(8, 96, per_token=2, shared_ffn_size=48))
    more = 8 * 2 * (3 * 48 + 2 * 64)  # two halves, their product, the output, and the output times its gate
    assert layers(role(ParallelLayout(1), shared), 0, 1) == 8 * (LAYER - 2 * 3 * 192 + MIXTURE) + INPUT + SENT + more


def test_a_forward_pass_keeps_one_layer() -> None:
    assert forward_activations(Pass(role(ParallelLayout(1)), 100), 0).layers == 100 * LAYER


def test_logits_are_the_last_stages_and_come_when_no_layer_computes() -> None:
    made = replace(role(ParallelLayout(4, tp=2, pp=2)), geometry=DENSE)
    assert head_bytes(Pass(made, 100), 0, training=True) == 0
    # The final norm, hidden states in fp32 and bf16 and their gradient, bf16 logits and twice fp32 logits (of 100 rows, less
    # than a chunk).
    expected = 2 * 2 * 100 * 64 + (4 + 2 + 2) * 100 * 64 + (2 + 2 * 4) * 100 * 500
    assert head_bytes(Pass(made, 100), 1, training=True) == expected
    found = training_activations(Pass(made, 100), 1, 1)
    kept = 4 * ((LAYER - ROTATION - 2 * 4 * 64) / 2 + ROTATION + 2 * 4 * 64) + INPUT + PASSED_ON
    assert (found.layers, found.logits) == (100 * kept, expected)
    # With 300,000 rows, one chunk of 268,435 exists, and the softmax reads parts of 64 MiB.
    many = (2 * 2 + 4 + 2 + 2) * 300_000 * 64 + 2 * 268_435 * 500 + 2 * 2**26
    assert head_bytes(Pass(made, 300_000), 1, training=True) == many
    value = role(ParallelLayout(4, tp=2, pp=2))
    assert head_bytes(Pass(value, 100), 1, training=True) == 2 * 2 * 100 * 64 + 2 * 4 * 100


def test_keys_of_shared_prefixes_are_copied_for_every_response() -> None:
    """A prompt of 1024 tokens has eight responses of 128: 2048 computed tokens, whose paths have 1024 + 8 * 1152 keys."""
    made, work = role(ParallelLayout(1)), Workload(64, 1024, 128, 8192, responses_per_prompt=8)
    assert work.copied_keys(made) == 10240 / 2048 == 5
    assert Workload(64, 1024, 128, 8192).copied_keys(made) == 0, "prefixes are not shared"
    plain, copied = (training_activations(Pass(made, MANY, copied_keys=keys), 0, 1).layers for keys in (0, 5))
    assert (copied - plain) / MANY == 8 * 2 * 5 * 2 * 32, "keys and values of two heads, in eight layers"
    llama = ModelGeometry("llama", 32, 4096, GroupedSizes(32, 8, 128), 14336, 128256, False)
    large = PlannedRole("actor", llama, ParallelLayout(1), True)
    plain, copied = (training_activations(Pass(large, 8192, copied_keys=keys), 0, 1).layers for keys in (0, 5))
    assert copied / plain == pytest.approx(1.13, abs=0.02)


def test_a_grouped_product_of_experts_reads_a_copy_of_their_weights() -> None:
    """In bf16, the copies are the first matrices of all experts of a rank and their gradients. A single expert needs no copy."""
    tokens = 10
    for ep, count in ((1, 8), (4, 2), (8, 0)):
        layout = ParallelLayout(8, ep=ep, etp=1 if ep > 1 else None)
        found, in_fp32 = (
            forward_activations(Pass(role(layout, EXPERTS, dtype=dtype), tokens), 0).layers
            for dtype in ("bf16", "fp32")
        )
        without = tokens * (LAYER - 2 * 3 * 192 + MIXTURE + (SENT if ep < 8 else SENT - 2 * 64 * 2))
        assert found == without + 2 * count * 2 * 96 * 64
        assert in_fp32 < 2 * without
