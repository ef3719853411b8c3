"""Compare weights and optimizer state with published sizes and sums by hand, and engines with a list of their tensors."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from rlhf_mcore.geometry import AdapterSizes, ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import active_parameters, num_parameters
from rlhf_mcore.planning.engines import engine_bytes, kv_bytes_per_token, state_bytes_per_sequence
from rlhf_mcore.planning.inputs import EngineGrid, PlannedRole
from rlhf_mcore.planning.memory import (
    checkpoint_bytes,
    copies_in_8_bits,
    staging_bytes,
    state_bytes,
    stepped_gradients,
    weights_of_pass,
)
from rlhf_mcore.readers.model_files import read_geometry
from tests.engine_layout import engine_tensors, weight_bytes

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
# Parameters as counted by the models' pages on the Hugging Face hub from their safetensors files.
PARAMETERS = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-llm-7b-chat": 6_910_365_696,
    # Without MTP layers, as transformers builds them, and with the biases of experts.
    "DeepSeek-V3": 671_026_419_200,
    "Kimi-K2": 1_026_408_232_448,
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.7-Flash": 29_943_393_920,
    # As transformers builds it, and 32.0 B in its report (arXiv 2507.11407).
    "EXAONE-4.0-32B": 32_003_216_384,
    # As transformers builds it. The page of GLM-5, which has more indexers, says 744 B.
    "GLM-5.2": 743_377_019_904,
    # Without the 13_880_064 scales of its file in fp8.
    "MiniMax-M2": 228_689_764_864,
    # 81_324_862_720 with the MTP layer.
    "Qwen3-Next-80B-A3B": 79_674_391_296,
    # As transformers builds it. The paper says 31.6 B, 3.2 B of them active (arXiv 2512.20848).
    "Nemotron-3-Nano-30B-A3B": 31_577_940_288,
    # gpt-oss with bf16 weights, and only the language models of Gemma 3 and 4 (with the scales of layers).
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "gpt-oss-120b": 116_829_156_672,
    "Gemma-3-27B": 27_009_346_304,
    "Gemma-4-31B": 30_697_345_340,
    "Gemma-4-26B-A4B": 25_233_141_790,
}


def role(name: str, layout: ParallelLayout, *, dtype: str = "bf16", head: str = "lm") -> PlannedRole:
    return PlannedRole("actor", read_geometry(MODELS / name, head), layout, True, dtype)


def test_parameters_are_the_published_ones() -> None:
    counted = {
        path.parent.name: num_parameters(read_geometry(path.parent, "lm")) for path in MODELS.glob("*/config.json")
    }
    assert counted == PARAMETERS


def test_active_parameters_of_stacked_experts() -> None:
    gemma = read_geometry(MODELS / "Gemma-4-26B-A4B", "lm")
    assert active_parameters(gemma) / 1e9 == pytest.approx(3.8, abs=0.05)  # as its name says, with the output layer
    # 5.13 B without the embedding (arXiv 2508.10925, table 1).
    geometry = read_geometry(MODELS / "gpt-oss-120b", "lm")
    assert active_parameters(geometry) / 1e9 == pytest.approx(5.13, rel=0.002)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22), ("DeepSeek-V3", 37), ("Kimi-K2", 32.6)],
)
def test_active_parameters_are_what_the_names_say(name: str, billions: float) -> None:
    # The reports include the embedding (arXiv 2505.09388, table 2 with A3B and A22B; the 30B model's card says 3.3 B;
    # arXiv 2412.19437
    # and 2507.20534 say 37 and 32.6 B).
    geometry = read_geometry(MODELS / name, "lm")
    embedding = geometry.vocab_size * geometry.hidden_size
    assert (active_parameters(geometry) + embedding) / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_shared_expert_is_counted_with_every_token() -> None:
    """Qwen1.5-MoE-A2.7B: "14.3B parameters in total and 2.7B activated parameters during runtime" (its model card)."""
    geometry = ModelGeometry(
        "qwen2_moe", 24, 2048, GroupedSizes(16, 16, 128), 5632, 151936, False,
        experts=ExpertSizes(60, 1408, per_token=4, shared_ffn_size=5632),
    )  # fmt: skip
    assert num_parameters(geometry) == 14_315_784_192
    embedding = geometry.vocab_size * geometry.hidden_size
    assert (active_parameters(geometry) + embedding) / 1e9 == pytest.approx(2.7, rel=0.02)


# ------------------------------------------------------------------------------------------------------------------ state
def test_one_rank_holds_18_bytes_a_parameter_in_bf16_and_16_in_fp32() -> None:
    count, alone = PARAMETERS["Llama-3-8B"], ParallelLayout(1)
    state = state_bytes(role("Llama-3-8B", alone), 0)
    assert (state.weights, state.gradients) == (2 * count, 4 * count)
    assert (state.masters, state.moments) == (4 * count, 8 * count)
    full = state_bytes(role("Llama-3-8B", alone, dtype="fp32"), 0)
    assert (full.weights, full.gradients, full.masters, full.moments) == (4 * count, 4 * count, 0, 8 * count)
    assert state_bytes(replace(role("Llama-3-8B", alone), trained=False), 0).total == 2 * count
    halved = state_bytes(replace(role("Llama-3-8B", alone), megatron={"grad_reduce_in_fp32": False}), 0)
    assert halved == replace(state, gradients=2 * count)
    in_layers = count - 2 * 128256 * 4096 - 4096
    muon, sgd = (state_bytes(replace(role("Llama-3-8B", alone), optimizer=name), 0).moments for name in ("muon", "sgd"))
    assert (muon, sgd) == (4 * (2 * count - in_layers), 4 * count)


def test_a_hosted_or_16_bit_optimizer_state_is_not_on_the_device() -> None:
    """16-bit state: two bf16 moments and the lower half of the master. The host keeps and steps a share in fp32."""
    count, alone = PARAMETERS["Llama-3-8B"], role("Llama-3-8B", ParallelLayout(2))
    halved = {"grad_reduce_in_fp32": False}
    narrow = state_bytes(replace(alone, state_dtype="bf16"), 0)
    assert (narrow.weights, narrow.gradients) == (2 * count, 4 * count)
    assert (narrow.masters, narrow.moments, narrow.hosted) == (2 * count // 2, 4 * count // 2, 0)
    hosted = replace(alone, hosted=0.75)
    state = state_bytes(hosted, 0)
    assert (state.masters, state.moments, state.hosted) == (count // 2, 2 * count // 2, 9 * count // 2)
    assert state.total == (2 + 4) * count + 3 * count // 2
    assert staging_bytes(hosted, 0) == 384 * 2**20 and staging_bytes(alone, 0) == 0
    full = state_bytes(replace(hosted, dtype="fp32"), 0)
    assert (full.masters, full.moments, full.hosted) == (0, 2 * count // 2, 6 * count // 2)
    # All 16-bit gradients are copied for a step in fp32. A step with 16-bit state reads them as they are.
    assert stepped_gradients(replace(hosted, megatron=halved), 0) == 4 * count // 2
    assert stepped_gradients(replace(alone, megatron=halved, state_dtype="bf16"), 0) == 0


def test_tensor_and_pipeline_ranks_share_everything_and_data_parallel_ranks_the_state() -> None:
    layout = ParallelLayout(8, tp=2, pp=4)
    parts = [state_bytes(role("Llama-3-8B", layout), rank) for rank in range(8)]
    norms = (2 * 32 + 1) * 4096  # both tensor-parallel ranks hold it
    assert sum(part.weights for part in parts) == 2 * (PARAMETERS["Llama-3-8B"] + norms)
    replicas = ParallelLayout(16, tp=2, pp=4)
    assert sum(state_bytes(role("Llama-3-8B", replicas), rank).moments for rank in range(16)) == sum(
        part.moments for part in parts
    )
    apart = role("Llama-3-8B", ParallelLayout(4, first_rank=4))
    assert state_bytes(apart, 0).total == 0 < state_bytes(apart, 4).total


def test_experts_are_dealt_and_the_rest_is_not() -> None:
    name, layout = "Qwen3-30B-A3B", ParallelLayout(8, ep=8, etp=1)
    experts = 48 * 128 * 3 * 2048 * 768
    state = state_bytes(role(name, layout), 0)
    assert state.weights == 2 * (PARAMETERS[name] - experts + experts // 8)
    # All eight ranks step the shared rest. Only the rank with an expert steps it.
    assert state.moments == 8 * ((PARAMETERS[name] - experts) // 8 + experts // 8)


def test_a_value_head_takes_the_place_of_the_output_layer() -> None:
    critic = role("Llama-3-8B", ParallelLayout(1), head="token")
    count = PARAMETERS["Llama-3-8B"] - 128256 * 4096 + 4096 + 1
    assert num_parameters(critic.geometry) == count
    assert checkpoint_bytes(critic) == count * (2 + 4 + 8)


def test_layers_that_come_one_by_one_are_two_at_a_time() -> None:
    frozen = replace(role("Qwen2.5-7B", ParallelLayout(1)), trained=False, by_layer=True)
    # Embedding, output layer, last norm; two layers of 233,057,792.
    assert weights_of_pass(frozen, 0) == 2 * (1_089_998_336 + 2 * 233_057_792)


def test_products_in_8_bits_keep_copies_of_the_matrices_of_a_rank_for_a_pass() -> None:
    """Llama-3-8B on two ranks.

    Rows and columns per layer: 2,048 + 2 * 512 of 4,096; 4,096 of 2,048; 14,336 of 4,096; 4,096 of 7,168.
    """
    matrices = 32 * (3072 * 4096 + 4096 * 2048 + 14336 * 4096 + 4096 * 7168)
    made = replace(role("Llama-3-8B", ParallelLayout(2, tp=2)), fp8=True)
    assert copies_in_8_bits(made, 0, training=False) == pytest.approx(matrices, rel=0.001)
    assert copies_in_8_bits(made, 0, training=True) == 2 * copies_in_8_bits(made, 0, training=False)
    assert copies_in_8_bits(replace(made, fp8=False), 0, training=True) == 0
    assert copies_in_8_bits(made, 2, training=True) == 0  # belongs to other ranks


# Per layer: queries, keys and values 128 x 64, output 64 x 64, gate and up 256 x 64, down 64 x 128, four norms.
MODEL = ModelGeometry("qwen3", 2, 64, GroupedSizes(4, 2, 16), 128, 128, True)
LAYER = (128 + 64 + 256 + 128) * 64 + 2 * 64 + 2 * 16
# Rank 8: A of three, one, two and one matrices, and each B.
ADAPTERS = 2 * (8 * ((3 + 1 + 2) * 64 + 128) + 8 * (128 + 64 + 256 + 64))


def build_adapted(targets: tuple[str, ...] = ("all-linear",), layout: ParallelLayout | None = None) -> PlannedRole:
    sizes = AdapterSizes(8, 16.0, targets)
    return PlannedRole("actor", MODEL, layout or ParallelLayout(1), True, adapters=replace(MODEL, adapter=sizes))


def test_weights_with_adapters_have_no_gradients_and_no_state() -> None:
    planned = build_adapted()
    assert planned.adapters is not None and num_parameters(planned.adapters) == ADAPTERS
    state = state_bytes(planned, 0)
    assert state.weights == 2 * (2 * LAYER + 128 * 64 + 64 + ADAPTERS)
    assert (state.gradients, state.masters, state.moments) == (4 * ADAPTERS, 4 * ADAPTERS, 8 * ADAPTERS)
    assert checkpoint_bytes(planned) == ADAPTERS * (2 + 4 + 8)
    one = build_adapted(("model.layers.1.self_attn.o_proj",), ParallelLayout(2, pp=2))
    assert [state_bytes(one, rank).gradients for rank in range(2)] == [0, 4 * 8 * (64 + 64)]


def test_ranks_share_the_part_of_adapters_that_is_split() -> None:
    """Each of two ranks holds the whole A of row-split matrices, half of the A of column-split matrices, and half or all of B."""
    a = 8 * ((3 + 2) * 64 + (64 + 128) // 2)
    b = 8 * ((128 + 256) // 2 + 64 + 64)
    assert state_bytes(build_adapted(layout=ParallelLayout(2, tp=2)), 1).gradients == 4 * 2 * (a + b)


# ---------------------------------------------------------------------------------------------------------------- engines
@pytest.mark.parametrize("name", ["Llama-3-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3-Next-80B-A3B", "gpt-oss-120b"])
def test_an_engine_rank_holds_what_its_tensors_have(name: str) -> None:
    """Key heads may be replicated and vocabularies padded. The models have fewer layers and experts, for speed."""
    geometry = replace(read_geometry(MODELS / name, "lm"), num_layers=8)
    grids = [EngineGrid(1), EngineGrid(8)]
    if geometry.experts is None:
        grids += [EngineGrid(4, pp=2)]
    else:
        geometry = replace(geometry, experts=replace(geometry.experts, count=16))
        grids += [EngineGrid(4, ep=4), EngineGrid(dp=8, ep=8)]
    held = [engine_bytes(geometry, grid, "bf16", None) for grid in grids]
    assert held == pytest.approx([weight_bytes(geometry, grid, 2, None) for grid in grids], rel=0.05)


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_weights_of_engines_in_8_bits(quantization: str) -> None:
    for name in ("Llama-3-8B", "Qwen3-30B-A3B"):
        geometry = replace(read_geometry(MODELS / name, "lm"), num_layers=4)
        expected = weight_bytes(geometry, EngineGrid(2), 2, quantization)
        assert engine_bytes(geometry, EngineGrid(2), "bf16", quantization) == pytest.approx(expected, rel=0.02)


def test_mtp_layers_are_in_engines_that_draft_with_them() -> None:
    geometry = replace(read_geometry(MODELS / "GLM-4.5-Air", "lm"), num_layers=4, mtp_layers=1)
    grid = EngineGrid(8, drafts=True)
    tensors = engine_tensors(geometry, grid, 0)
    expected = 2 * sum(prod(tensor.shape) for tensor in tensors)
    assert engine_bytes(geometry, grid, "bf16", None) == pytest.approx(expected, rel=0.05)
    assert engine_bytes(geometry.trunk, grid, "bf16", None) < engine_bytes(geometry, grid, "bf16", None)


def test_key_heads_are_replicated_if_there_are_fewer_than_ranks() -> None:
    geometry = read_geometry(MODELS / "Llama-3-8B", "lm")  # 8 key heads of 128, 32 layers
    assert kv_bytes_per_token(geometry, EngineGrid(1), 2) == 128 * 1024  # 2 * 32 * 8 * 128 * 2
    assert (
        kv_bytes_per_token(geometry, EngineGrid(8), 2) == kv_bytes_per_token(geometry, EngineGrid(16), 2) == 16 * 1024
    )


def test_an_indexer_keeps_keys_in_fp8() -> None:
    geometry = read_geometry(MODELS / "GLM-5.2", "lm")
    # 78 latents of 512 + 64 in bf16. 21 layers have an indexer, as vLLM builds it: a key of 128 bytes with a scale in fp32.
    assert kv_bytes_per_token(geometry, EngineGrid(8), 2) == 78 * 1152 + 21 * 132


def test_gated_delta_nets_keep_states_of_a_sequence() -> None:
    geometry = read_geometry(MODELS / "Qwen3-Next-80B-A3B", "lm")
    # 36 layers of 32 states of 128 x 128 in fp32, and 3 tokens of 2 * 16 + 32 heads of 128 in bf16.
    held = 36 * (4 * 32 * 128 * 128 + 2 * 3 * 64 * 128)
    assert state_bytes_per_sequence(geometry, EngineGrid(1), 2) == held == 77_266_944
    assert state_bytes_per_sequence(geometry, EngineGrid(8), 2) == held // 8
    assert state_bytes_per_sequence(MODEL, EngineGrid(1), 2) == 0


def test_state_spaces_keep_states_of_a_sequence() -> None:
    geometry = read_geometry(MODELS / "Nemotron-3-Nano-30B-A3B", "lm")
    # 23 layers of 64 states of 64 x 128 in fp32, and 3 tokens of 64 heads of 64 and 2 projections of 8 groups of 128 in bf16.
    held = 23 * (4 * 64 * 64 * 128 + 2 * 3 * (64 * 64 + 2 * 8 * 128))
    assert state_bytes_per_sequence(geometry, EngineGrid(1), 2) == held
    assert state_bytes_per_sequence(geometry, EngineGrid(8), 2) == held // 8
    assert kv_bytes_per_token(geometry, EngineGrid(1), 2) == 6 * 2 * 2 * 128 * 2  # 6 layers with 2 key heads
