"""Test 8-bit weights: rejected combinations, and the rollout correction that they enable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.families.quantised import QUANTISATIONS, cut_problems, quantisation_problems
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, IndexerSizes, LatentSizes, ModelGeometry
from rlhf_mcore.rollout.vllm import limits
from tests.unit.config.checking import check, only

LLAMA = ModelGeometry("llama", 32, 4096, GroupedSizes(32, 8, 128), 14336, 128256, False)


def test_weights_may_have_8_bits(workspace: Any) -> None:
    for quantization in ["fp8", "int8"]:
        for overrides in [[], ["rollout.engine=hf"], ["actor.lora.rank=8"]]:
            assert check(f"rollout.quantization={quantization}", *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["bridge.method=gather"], ["bridge.method=gather", "planned"]),
        (["actor.lora.rank=8", "actor.lora.sync=adapter"], ["quantised weights", "actor.lora.sync=merge"]),
    ],
)
def test_what_8_bits_do_not_go_with_is_named(workspace: Any, overrides: list[str], words: list[str]) -> None:
    problem = only(check("rollout.quantization=fp8", *overrides))
    assert all(word in problem for word in ["rollout.quantization=fp8", *words]), problem


def test_a_choice_is_one_of_two(workspace: Any) -> None:
    assert "rollout.quantization='fp4' is not a choice" in only(check("rollout.quantization=fp4"))


def test_the_correction_is_on_unless_it_is_set(workspace: Any) -> None:
    for overrides, mode in [
        ([], "off"),
        (["rollout.quantization=int8"], "token"),
        (["rollout.quantization=fp8", "algorithm.rollout_correction.mode=off"], "off"),
        (["rollout.quantization=fp8", "algorithm.rollout_correction.mode=sequence"], "sequence"),
    ]:
        assert resolve(load_config("run.yaml", overrides)).algorithm.rollout_correction.mode == mode


def test_models_of_other_tensors_are_named() -> None:
    latent = replace(LLAMA, family="deepseek_v3", attention=LatentSizes(4, 192, 64, 128, 512))
    stacked = replace(LLAMA, family="gpt_oss", experts=ExpertSizes(4, 256, 2))
    assert [list(quantisation_problems(g)) for g in (LLAMA, latent, stacked)] == [
        [],
        ["latent attention"],
        ["experts in one tensor per layer"],
    ]


def test_cut_blocks_are_named() -> None:
    for geometry, tp, cut in [
        (LLAMA, 8, ""),  # 512 query rows, 128 key rows, 1792 MLP rows
        (LLAMA, 16, ""),  # 896 MLP rows; two ranks hold the same whole key head
        (LLAMA, 32, "rows of gate_proj: 448 on a rank"),
        (replace(LLAMA, attention=GroupedSizes(32, 8, 64)), 8, "keys: 64 on a rank"),
        (replace(LLAMA, attention=GroupedSizes(64, 3, 64)), 1, "keys: 192 on a rank"),
        (replace(LLAMA, family="qwen3_moe", experts=ExpertSizes(128, 768, 8)), 2, ""),
        (
            replace(LLAMA, family="qwen3_moe", experts=ExpertSizes(128, 768, 8)),
            4,
            "an expert's gate_proj: 192 on a rank",
        ),
    ]:
        problems = list(cut_problems(geometry, tp))
        assert cut in " ".join(problems) and bool(problems) == bool(cut), problems


def test_experts_are_cut_by_all_groups_or_whole() -> None:
    """Qwen3-30B-A3B has experts of 768 rows, 32 query heads of 128 and 4 key heads."""
    for sizes, cut in [
        ((4, 1, 4), ""),  # whole experts
        ((1, 2, 1), ""),  # 384 rows
        ((1, 4, 1), "an expert's gate_proj: 192 on a rank"),
        ((2, 2, 1), "an expert's gate_proj: 192 on a rank"),
        ((2, 2, 4), ""),
        ((8, 1, 8), ""),  # two ranks share a key head of 128
        ((64, 1, 64), "queries: 64 on a rank"),
    ]:
        mixture = ModelGeometry(
            "qwen3_moe", 48, 2048, GroupedSizes(32, 4, 128), 6144, 151936, False, experts=ExpertSizes(128, 768, 8)
        )
        problems = list(cut_problems(mixture, *sizes))
        assert cut in " ".join(problems) and bool(problems) == bool(cut), problems


def problems_of(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    return limits.model_problems(cfg.rollout, cfg.model, geometry, records_routes=False)


def test_a_group_that_cuts_a_block_is_named_with_whole_experts_as_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "has_gpu", lambda: True)
    cfg, mixture = Config(), replace(LLAMA, family="qwen3_moe", experts=ExpertSizes(128, 768, 8))
    cfg.rollout.quantization, cfg.rollout.layout.dp, cfg.model.dtype = "fp8", 4, "bf16"
    (problem,) = problems_of(cfg, mixture)
    assert (
        "rollout.layout.tp=1 and dp=4 splits 128x128 blocks" in problem
        and "whole experts (rollout.layout.ep=4)" in problem
    )
    cfg.rollout.layout.ep = 4
    assert list(problems_of(cfg, mixture)) == []


def test_stages_of_vllm_do_not_send_selected_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "has_gpu", lambda: True)
    attention = LatentSizes(4, 192, 64, 128, 512, 512, IndexerSizes(4, 64, 8, shared_layers=(1,)))
    cfg, model = Config(), replace(LLAMA, family="glm_moe_dsa", attention=attention)
    assert list(problems_of(cfg, model)) == []
    cfg.rollout.layout.pp = 2
    (problem,) = problems_of(cfg, model)
    assert "rollout.layout.pp=2" in problem and "set it to 1" in problem


def test_vllm_takes_whole_blocks_and_no_fp32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for quantization, dtype, tp, words in [
        ("fp8", "bf16", 8, []),
        ("int8", "bf16", 32, []),
        ("fp8", "bf16", 32, ["rollout.layout.tp=32", "448", "int8"]),
        ("int8", "fp32", 1, ["model.dtype=fp32", "bf16"]),
    ]:
        monkeypatch.setattr(limits, "has_gpu", lambda: True)
        cfg = Config()
        cfg.rollout.quantization, cfg.rollout.layout.tp, cfg.model.dtype = quantization, tp, dtype
        problems = " ".join(problems_of(cfg, LLAMA))
        assert bool(problems) == bool(words) and all(word in problems for word in words), problems
        monkeypatch.setattr(limits, "has_gpu", lambda: False)
        assert list(problems_of(cfg, LLAMA)) == []


def test_matrices_of_layers_have_8_bits() -> None:
    for name, has in [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("model.layers.11.mlp.experts.7.down_proj.weight", True),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", True),
        ("model.layers.0.block_sparse_moe.experts.3.w2.weight", True),
        ("model.layers.0.block_sparse_moe.gate.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.mlp.shared_expert_gate.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ]:
        assert [kind.applies(name) for kind in QUANTISATIONS.values()] == [has, has]
