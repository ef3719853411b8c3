"""Test ``actor.fp8``: combinations that are rejected before a start, and the settings of engines that follow from it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from rlhf_mcore.bridge.plan.sent_weights import sent_quantisation
from rlhf_mcore.cli import preflight
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.questions import longest_example
from rlhf_mcore.config.rules.fp8 import fp8_problems
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, LatentSizes, ModelGeometry
from tests.messages import assert_names, expect_error
from tests.unit.config.checking import check, only

LLAMA = ModelGeometry("llama", 32, 4096, GroupedSizes(32, 8, 128), 14336, 128256, False)
MIXTURE = replace(LLAMA, family="qwen3_moe", experts=ExpertSizes(128, 768, 8))
SIZES = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
ON = "actor.fp8=blockwise"


@pytest.fixture
def whole_blocks(workspace: Any) -> None:
    """Write a model whose matrices consist of 128x128 blocks."""
    workspace.write_hf_config(**SIZES)


@pytest.mark.usefixtures("whole_blocks")
def test_a_policy_may_compute_in_8_bits() -> None:
    for overrides in [
        [],
        ["rollout.quantization=fp8"],
        ["actor.layout.tp=1", "actor.megatron.overlap_grad_reduce=true"],
        ["algorithm.advantage=gae", "critic.lora.rank=4"],
        ["actor.recompute.granularity=full"],
    ]:
        assert check(ON, *overrides) == []


@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.layer_spec=local"], ("model.layer_spec=local", "model.layer_spec=te")),
        (["model.dtype=fp32"], ("model.dtype=fp32", "model.dtype=bf16")),
        (["actor.megatron.fp8=hybrid"], ("actor.megatron.fp8", "remove")),
        (["actor.megatron.fp8_recipe=mxfp8"], ("actor.megatron.fp8_recipe", "remove")),
        (["actor.megatron.first_last_layers_bf16=true"], ("actor.megatron.first_last_layers_bf16", "remove")),
        (["actor.lora.rank=8"], ("actor.lora.rank=8", "null")),
    ],
)
def test_what_it_does_not_go_with_is_named(overrides: list[str], named: tuple[str, str]) -> None:
    assert_names(only(check(ON, *overrides)), field=ON, value=named[0], remedy=named[1])


@pytest.mark.parametrize(
    ("geometry", "layout", "problem"),
    [
        (LLAMA, {"tp": 16}, "actor.layout.tp=16 splits the 8 key heads"),
        (replace(LLAMA, ffn_size=13824), {"tp": 8}, "rows of gate_proj: 1728 on a rank"),
        (replace(LLAMA, attention=GroupedSizes(32, 8, 64)), {}, "head size 64 is not a multiple of 128"),
        (replace(LLAMA, hidden_size=4104), {}, "hidden_size=4104 is not a multiple of 16"),
        (MIXTURE, {"tp": 4}, "an expert's gate_proj: 192 on a rank"),
        (replace(LLAMA, family="deepseek_v3", attention=LatentSizes(4, 192, 64, 128, 512)), {}, "latent attention"),
    ],
)
def test_blocks_that_a_rank_has_otherwise_than_engines_are_named(
    geometry: ModelGeometry, layout: dict[str, int], problem: str
) -> None:
    cfg = Config()
    cfg.actor.fp8 = "blockwise"
    for axis, size in layout.items():
        setattr(cfg.actor.layout, axis, size)
    found = list(fp8_problems(cfg, geometry))
    if not problem:
        assert found == []
    else:
        text = only(found)
        assert problem in text, text
        assert_names(text, field=ON, remedy=("null", "actor.megatron={fp8: e4m3, fp8_recipe: blockwise}"))


@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize(
    ("gpu", "package", "lacks"),
    [
        (False, True, "GPUs of compute capability 9.0"),
        (True, False, "Transformer Engine"),
    ],
)
def test_a_machine_without_the_means_is_told_so_before_processes_start(
    gpu: bool, package: bool, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = load_config("run.yaml", [ON])
    packages = {"transformer_engine": object() if package else None}
    monkeypatch.setattr(preflight, "has_gpu", lambda: gpu)
    monkeypatch.setattr(preflight, "find_spec", lambda name: packages[name] if name in packages else find_spec(name))
    if lacks:
        with expect_error(ConfigError, field=ON, value=lacks, remedy="null"):
            preflight.check_packages(cfg)
    else:
        preflight.check_packages(cfg)


@pytest.mark.usefixtures("workspace")
def test_bf16_optimizer_state_needs_transformer_engine_before_processes_start() -> None:
    cfg = load_config("run.yaml", ["actor.optimizer.state_dtype=bf16"])
    with expect_error(ConfigError, field="actor.optimizer.state_dtype=bf16", value="Transformer Engine", remedy="fp32"):
        preflight.check_packages(cfg)


@pytest.mark.parametrize(
    ("policy", "engines", "sent"),
    [
        (None, None, None),
    ],
)
def test_engines_are_sent_what_the_policy_computes_with(
    policy: str | None, engines: str | None, sent: str | None
) -> None:
    cfg = Config()
    cfg.actor.fp8, cfg.rollout.quantization = policy, engines
    assert sent_quantisation(cfg) == sent


@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize("setting", [ON, "actor.megatron.fp8=hybrid"])
def test_the_longest_row_fits_with_its_padding_to_32_tokens(setting: str) -> None:
    sizes = ["data.max_prompt_tokens=100", "rollout.sampling.max_new_tokens=101"]
    assert check(*sizes, "trainer.max_tokens_per_microbatch=201") == []
    problem = only(check(setting, *sizes, "trainer.max_tokens_per_microbatch=201"))
    assert_names(problem, field="trainer.max_tokens_per_microbatch=201", value="actor", remedy="224")
    assert check(setting, *sizes, "trainer.max_tokens_per_microbatch=224") == []
    cfg = load_config("run.yaml", [setting, "algorithm.kind=sft", "trainer.max_tokens_per_microbatch=201"])
    assert longest_example(cfg) == 192
