"""Sizes of well-known models from their config.json, and bytes by hand. Real Megatron models: tests/distributed/test_planning.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_mcore.bridge.map.coverage import check_coverage
from rlhf_mcore.bridge.map.layouts import stage_names, trainer_places
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.model_files import read_geometry
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import active_parameters, num_parameters
from rlhf_mcore.planning.inputs import EngineGrid, PlannedRole
from rlhf_mcore.planning.sync import destinations
from rlhf_mcore.planning.weights import checkpoint_bytes, copies_in_8_bits, state_bytes

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
# Numbers of parameters as the models' pages on the Hugging Face hub count them in their safetensors files.
PARAMETERS = {
    "Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-32B": 32_763_876_352,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "deepseek-llm-7b-chat": 6_910_365_696,
    # Without the layer for more tokens at a time, as transformers builds them, with the biases of experts.
    "DeepSeek-V3": 671_026_419_200,
    "Kimi-K2": 1_026_408_232_448,
    "GLM-4.5-Air": 106_852_251_264,
    # 81_324_862_720 with the MTP layer.
    "Qwen3-Next-80B-A3B": 79_674_391_296,
    # gpt-oss as its weights are in bf16; of Gemma 3 the language model.
    "Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen3-VL-4B-Instruct": 4_437_815_808,
    "gpt-oss-120b": 116_829_156_672,
    "Gemma-3-27B": 27_009_346_304,
}


def role(
    name: str, layout: ParallelLayout, *, trained: bool = True, dtype: str = "bf16", head: str = "lm"
) -> PlannedRole:
    return PlannedRole("actor", read_geometry(MODELS / name, head), layout, trained, dtype)


def test_every_described_model_is_known() -> None:
    assert {path.parent.name for path in MODELS.glob("*/config.json")} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    geometry = read_geometry(MODELS / name, "lm")
    assert num_parameters(geometry) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["gpt-oss-120b", "Gemma-3-27B", "Qwen3-Next-80B-A3B"])
def test_every_element_reaches_the_engines(name: str) -> None:
    geometry = replace(read_geometry(MODELS / name, "lm"), num_layers=2)
    if geometry.delta is not None:
        geometry = replace(geometry, delta=replace(geometry.delta, layers=geometry.delta.layers[:1]))
    layout = ParallelLayout(4, 2, 2, None, 1, True, 2, 1) if geometry.num_experts else ParallelLayout(4, tp=2, pp=2)
    for fused in (False, True):
        sources = trainer_places(stage_names(geometry, layout, fused=fused), geometry, layout)
        check_coverage(sources, destinations(geometry, EngineGrid(2), 2), hf_shapes(geometry))


def test_active_parameters_of_stacked_experts() -> None:
    # 5.13 B without the embedding (arXiv 2508.10925, table 1).
    geometry = read_geometry(MODELS / "gpt-oss-120b", "lm")
    assert active_parameters(geometry) / 1e9 == pytest.approx(5.13, rel=0.002)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22), ("DeepSeek-V3", 37), ("Kimi-K2", 32.6)],
)
def test_active_parameters_are_what_the_names_say(name: str, billions: float) -> None:
    # The reports count the embedding too (arXiv 2505.09388, table 2 with A3B and A22B; the 30B model's card says 3.3 B; arXiv
    # 2412.19437 and 2507.20534 say 37 and 32.6 B).
    geometry = read_geometry(MODELS / name, "lm")
    embedding = geometry.vocab_size * geometry.hidden_size
    assert (active_parameters(geometry) + embedding) / 1e9 == pytest.approx(billions, rel=0.02)


def test_one_rank_holds_18_bytes_a_parameter_in_bf16_and_16_in_fp32() -> None:
    count = PARAMETERS["Llama-3-8B"]
    alone = ParallelLayout(1)
    state = state_bytes(role("Llama-3-8B", alone), 0)
    assert (state.weights, state.gradients) == (2 * count, 4 * count)
    assert (state.masters, state.moments) == (4 * count, 8 * count)
    full = state_bytes(role("Llama-3-8B", alone, dtype="fp32"), 0)
    assert (full.weights, full.gradients, full.masters, full.moments) == (4 * count, 4 * count, 0, 8 * count)
    frozen = state_bytes(role("Llama-3-8B", alone, trained=False), 0)
    assert frozen.total == 2 * count


def test_data_parallel_ranks_share_masters_and_moments() -> None:
    whole = state_bytes(role("Llama-3-8B", ParallelLayout(1)), 0)
    shares = [state_bytes(role("Llama-3-8B", ParallelLayout(8)), rank) for rank in range(8)]
    assert sum(share.moments for share in shares) == whole.moments
    assert {share.weights for share in shares} == {whole.weights}


def test_tensor_and_pipeline_ranks_share_everything() -> None:
    layout = ParallelLayout(8, tp=2, pp=4)
    parts = [state_bytes(role("Llama-3-8B", layout), rank) for rank in range(8)]
    norms = (2 * 32 + 1) * 4096  # held by both tensor-parallel ranks
    assert sum(part.weights for part in parts) == 2 * (PARAMETERS["Llama-3-8B"] + norms)


def test_experts_are_dealt_and_the_rest_is_not() -> None:
    name, layout = "Qwen3-30B-A3B", ParallelLayout(8, ep=8, etp=1)
    experts = 48 * 128 * 3 * 2048 * 768
    state = state_bytes(role(name, layout), 0)
    assert state.weights == 2 * (PARAMETERS[name] - experts + experts // 8)
    # The shared rest is stepped by all eight ranks, an expert by the one that has it.
    assert state.moments == 8 * ((PARAMETERS[name] - experts) // 8 + experts // 8)


def test_a_value_head_takes_the_place_of_the_output_layer() -> None:
    critic = role("Llama-3-8B", ParallelLayout(1), head="token")
    count = PARAMETERS["Llama-3-8B"] - 128256 * 4096 + 4096 + 1
    assert num_parameters(critic.geometry) == count
    assert checkpoint_bytes(critic) == count * (2 + 4 + 8)


def test_a_rank_without_the_model_holds_nothing() -> None:
    apart = role("Llama-3-8B", ParallelLayout(4, first_rank=4))
    assert state_bytes(apart, 0).total == 0
    assert state_bytes(apart, 4).total == state_bytes(role("Llama-3-8B", ParallelLayout(4)), 0).total


def test_a_shared_expert_is_counted_with_every_token() -> None:
    """Qwen1.5-MoE-A2.7B: "14.3B parameters in total and 2.7B activated parameters during runtime" (its model card)."""
    geometry = ModelGeometry(
        "qwen2_moe", 24, 2048, GroupedSizes(16, 16, 128), 5632, 151936, False,
        experts=ExpertSizes(60, 1408, per_token=4, shared_ffn_size=5632),
    )  # fmt: skip
    assert num_parameters(geometry) == 14_315_784_192
    embedding = geometry.vocab_size * geometry.hidden_size
    assert (active_parameters(geometry) + embedding) / 1e9 == pytest.approx(2.7, rel=0.02)


def test_the_bias_of_experts_has_no_gradient() -> None:
    """GLM-4.5-Air: 128 numbers in each of the 45 layers behind the first, which a step moves without an optimizer."""
    geometry = read_geometry(Path(__file__).resolve().parents[3] / "configs" / "models" / "GLM-4.5-Air", "lm")
    role = PlannedRole("actor", geometry, ParallelLayout(1), trained=True)
    state, numel = state_bytes(role, 0), num_parameters(geometry) - 45 * 128
    assert 4 * numel <= state.gradients < 4 * numel + 4 * 128 * 64 * 48  # what is beside them is padding
    assert state.masters == 4 * numel


def test_products_in_8_bits_keep_copies_of_the_matrices_of_a_rank_for_a_pass() -> None:
    """Llama-3-8B on two ranks: of each layer 2,048 + 2 * 512 rows of 4,096, 4,096 of 2,048, 14,336 of 4,096 and 4,096 of 7,168."""
    matrices = 32 * (3072 * 4096 + 4096 * 2048 + 14336 * 4096 + 4096 * 7168)
    llama = ModelGeometry("llama", 32, 4096, GroupedSizes(32, 8, 128), 14336, 128256, False)
    role = PlannedRole("actor", llama, ParallelLayout(2, tp=2), True, fp8=True)
    assert copies_in_8_bits(role, 0, training=False) == matrices + 4 * matrices // 128**2
    assert copies_in_8_bits(role, 0, training=True) == 2 * (matrices + 4 * matrices // 128**2)
    assert copies_in_8_bits(replace(role, fp8=False), 0, training=True) == 0
    assert copies_in_8_bits(role, 2, training=True) == 0  # a rank of others
    assert state_bytes(role, 0) == state_bytes(replace(role, fp8=False), 0)
