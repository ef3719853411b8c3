"""Read the blocks of Nemotron's layers in every form that transformers reads, and keep engines equal to the trainer."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import ModelConfig, RolloutConfig
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.adapters import check_targets
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry
from rlhf_mcore.rollout.hf.engine import _build_model
from rlhf_mcore.rollout.vllm import limits

CONFIG: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "configs" / "models" / "Nemotron-3-Nano-30B-A3B" / "config.json").read_text()
)
FAMILY = FAMILIES["nemotron_h"]


def read(**changes: Any) -> ModelGeometry:
    return FAMILY.geometry(Fields({**CONFIG, **changes}, "config.json", "correct it"))


def test_a_pattern_and_lists_of_names_are_equal() -> None:
    names = ["linear_attention", "moe", "full_attention", "mlp"]
    expected = read(hybrid_override_pattern="ME*-")
    assert expected.blocks == ("state_space", "moe", "attention", "dense") and expected.num_layers == 4
    assert expected.layer_kind(0) == ("state_space", "none") and expected.layer_kind(1) == ("none", "moe")
    assert read(layers_block_type=names) == read(layer_types=names) == expected
    assert read(layers_block_type=["mamba", "moe", "attention", "mlp"]) == expected  # names in older files


@pytest.mark.parametrize(("has_gpu", "pattern", "count"), [(False, "ME*", 1), (False, "M-*", 0), (True, "ME*", 0)])
def test_vllm_needs_a_gpu_for_experts_without_gates(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, pattern: str, count: int
) -> None:
    monkeypatch.setattr(limits, "has_gpu", lambda: has_gpu)
    geometry = read(hybrid_override_pattern=pattern)
    found = [*limits.model_problems(RolloutConfig(), ModelConfig(path="model"), geometry, records_routes=False)]
    assert len(found) == count and all("experts without gates" in x and "rollout.engine=hf" in x for x in found)


def test_vllms_convolution_on_a_cpu_needs_multiples_of_32_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "has_gpu", lambda: False)
    sizes = {"mamba_num_heads": 6, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32}
    geometry = read(hybrid_override_pattern="M-*", **sizes)  # 96 inputs, and 64 projections into and out of states
    for tp, dtype, expected in ((1, "bf16", ""), (2, "fp32", ""), (2, "bf16", "has 112 of model.path=model")):
        cfg = RolloutConfig.model_validate({"layout": {"tp": tp}})
        found = limits.model_problems(cfg, ModelConfig(path="model", dtype=dtype), geometry, records_routes=False)  # type: ignore[arg-type]
        assert expected in (text := " ".join(found)) and bool(text) == bool(expected)


def test_adapters_that_peft_rejects_are_rejected() -> None:
    mixed = read(hybrid_override_pattern="M-*E")
    for targets, message in [
        (("all-linear",), r"PEFT does not support outputs of state spaces \(backbone.layers.0.mixer.out_proj\)"),
        (("*.layers.3.*",), "PEFT does not support experts without gates"),
        (("embeddings",), "'embeddings' is not a linear layer of the model"),
        (("in_proj", "q_proj", "*.layers.1.*"), None),
    ]:
        adapted = replace(mixed, adapter=AdapterSizes(2, 4.0, targets))
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            check_targets(FAMILY, adapted, "actor.lora.targets")


def test_transformers_engine_does_not_limit_time_steps(tmp_path: Path) -> None:
    small = {"hybrid_override_pattern": "M*", "hidden_size": 8, "vocab_size": 4, "mamba_num_heads": 8, "head_dim": 2}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **small}))
    engine: Any = SimpleNamespace(model_dir=str(tmp_path), images=None, seed=0, attention="auto", dtype="fp32")
    mixer: Any = _build_model(engine).get_submodule("model.layers.0.mixer")
    assert mixer.time_step_limit == (pytest.approx(0.0, abs=1e-20), torch.inf)
