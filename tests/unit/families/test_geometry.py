"""Compare the geometry read from config.json with transformers' own reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from transformers import AutoConfig

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import ExpertSizes, ModelGeometry
from rlhf_mcore.readers.model_files import inspect_model, read_geometry
from tests.messages import expect_error

JSON = TypeAdapter(ModelGeometry)
MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
SIZES = dict(vocab_size=101, hidden_size=512, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8)
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": dict(model_type="llama"),
    "Mistral": dict(model_type="mistral", num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen2": dict(model_type="qwen2", num_key_value_heads=4),
    "Qwen3": dict(model_type="qwen3", num_key_value_heads=1, tie_word_embeddings=True),
    "Qwen3Moe": dict(
        model_type="qwen3_moe", num_key_value_heads=2, head_dim=32, num_experts=6, moe_intermediate_size=24,
        mlp_only_layers=[1], decoder_sparse_step=2,
    ),
    "Qwen2Moe": dict(
        model_type="qwen2_moe", num_key_value_heads=2, num_experts=6, moe_intermediate_size=24, num_experts_per_tok=3,
        shared_expert_intermediate_size=80, mlp_only_layers=[1], decoder_sparse_step=2,
    ),
    "Mixtral": dict(model_type="mixtral", num_key_value_heads=2, num_local_experts=5),
}  # fmt: skip


def write(directory: Path, **config: object) -> None:
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes(tmp_path: Path, name: str) -> None:
    write(tmp_path, **SIZES, **CONFIGS[name], architectures=[f"{name}ForCausalLM"])
    found, hf = read_geometry(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert found.family == hf.model_type
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (4, 512, 101)
    assert found.num_kv_heads == hf.num_key_value_heads
    assert found.head_dim == (getattr(hf, "head_dim", None) or 512 // 8)
    assert found.ffn_size == hf.intermediate_size
    assert found.tied_embeddings is bool(hf.tie_word_embeddings)
    if "num_local_experts" in CONFIGS[name] or "num_experts" in CONFIGS[name]:
        assert found.experts == ExpertSizes(
            count=getattr(hf, "num_local_experts", None) or hf.num_experts,
            ffn_size=getattr(hf, "moe_intermediate_size", hf.intermediate_size),
            per_token=hf.num_experts_per_tok,
            shared_ffn_size=getattr(hf, "shared_expert_intermediate_size", 0),
            dense_layers=(0, 1, 2) if name in ("Qwen3Moe", "Qwen2Moe") else (),
        )
    else:
        assert found.experts is None


def test_a_geometry_survives_json() -> None:
    for model in sorted(path.name for path in MODELS.iterdir() if path.is_dir()):
        geometry = read_geometry(MODELS / model)
        assert JSON.validate_json(JSON.dump_json(geometry)) == geometry


TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 14,
    "out_hidden_size": 64,
}
ROPE = {"rope_type": "mrope", "mrope_section": [2, 3, 3], "rope_theta": 1e6}


def test_sizes_beside_a_tower_are_those_of_the_language_model_wherever_they_stand(tmp_path: Path) -> None:
    """Hub files of Qwen2.5-VL store the sizes at the top level. transformers 5 saves them in text_config."""
    text = {**SIZES, "num_key_value_heads": 8, "rope_scaling": ROPE, "tie_word_embeddings": True}
    outer = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": 9, "vision_config": TOWER}
    found = []
    for name, config in (("flat", {**text, **outer}), ("nested", {"text_config": text, **outer})):
        (tmp_path / name).mkdir()
        write(tmp_path / name, **config)
        found.append(read_geometry(tmp_path / name))
    assert found[0] == found[1]
    assert found[0].tied_embeddings and found[0].vision is not None
    assert found[0].vision.sections == (2, 3, 3) and found[0].vision.tokens((1, 4, 6)) == 6
    assert JSON.validate_json(JSON.dump_json(found[0])) == found[0]


@pytest.mark.parametrize("sections", [None, [11, 11, 10], [11, 11, 11], [32]])
def test_a_quarter_of_a_head_of_qwen3_5_is_divided(tmp_path: Path, sections: list[int] | None) -> None:
    """A quarter of a published head of 256 elements is 32 pairs. config.json may omit it."""
    rope = {"rope_type": "default", "rope_theta": 1e7, **({} if sections is None else {"mrope_section": sections})}
    text = {
        **SIZES,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "head_dim": 256,
        "rope_parameters": rope,
        "full_attention_interval": 2,
    }
    config = {
        "text_config": text,
        "image_token_id": 9,
        "vision_config": {**TOWER, "out_hidden_size": SIZES["hidden_size"]},
    }
    write(tmp_path, **config, architectures=["Qwen3_5ForConditionalGeneration"])
    geometry, problems = inspect_model(str(tmp_path), "model.path")
    told = [problem for problem in problems if "mrope_section" in problem]
    if sections in (None, [11, 11, 10]):
        assert geometry is not None and geometry.vision is not None and geometry.vision.sections == (11, 11, 10)
        assert not told
    else:
        assert "does not divide 32 pairs of channels into three" in told[0]


@pytest.mark.parametrize("value", ["4", 0, -1, 2.0, True, [1]])
def test_a_size_that_is_none(tmp_path: Path, value: object) -> None:
    write(tmp_path, **{**SIZES, "num_hidden_layers": value}, architectures=["LlamaForCausalLM"])
    with expect_error(ConfigError, field="num_hidden_layers", remedy=(1, 1024)):
        read_geometry(tmp_path)
