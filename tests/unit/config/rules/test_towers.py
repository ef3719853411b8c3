"""Test vision towers: rejected settings, and values that published files omit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.rules.parts import vision_problems
from rlhf_mcore.config.schema import Config
from rlhf_mcore.readers.model_files import inspect_model, read_geometry, sees_images
from rlhf_mcore.rollout.vllm.limits import model_problems

# The settings of google/gemma-3-4b-it. transformers' defaults complete its language model.
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 9,
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e6},
        "vocab_size": 100,
    },
    "vision_config": {
        "depth": 2,
        "deepstack_visual_indexes": [0, 1],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_position_embeddings": 16,
        "out_hidden_size": 64,
        "patch_size": 16,
    },
}


def read(folder: Path, config: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return read_geometry(folder)


def test_published_gemma_3_has_transformers_defaults_beside_its_tower(tmp_path: Path) -> None:
    geometry = read(tmp_path, GEMMA)
    _, problems = inspect_model(str(tmp_path), "model.path")
    assert [problem for problem in problems if "safetensors" not in problem] == [] and sees_images(str(tmp_path))
    assert (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.vocab_size) == (8, 4, 256, 262208)
    assert geometry.tied_embeddings and geometry.window.tokens == 1024
    # 64 by 64 patches; 4 by 4 patches form a token.
    assert (geometry.vision.merge_size, geometry.vision.tokens((1, 64, 64))) == (4, 256)


@pytest.mark.parametrize(
    ("part", "changes", "told"),
    [
        ("vision_config", {"vision_use_head": True}, "vision_use_head is not supported"),
        ("vision_config", {"image_size": 900}, "image_size is not a multiple of patch_size=14"),
        ("vision_config", {"image_size": 910}, "4225 patches of an image do not form mm_tokens_per_image=256"),
        ("", {"tie_word_embeddings": False}, "tie_word_embeddings=false is not supported with a tower"),
    ],
)
def test_other_towers_than_gemmas_are_refused(tmp_path: Path, part: str, changes: dict[str, Any], told: str) -> None:
    read(tmp_path, GEMMA | (changes if not part else {part: GEMMA[part] | changes}))
    assert any(told in problem for problem in inspect_model(str(tmp_path), "model.path")[1])


def test_layers_and_engines_without_a_mask_are_refused_where_tokens_of_an_image_see_each_other(tmp_path: Path) -> None:
    cfg, geometry = Config(), read(tmp_path, GEMMA)
    assert not list(vision_problems(cfg, geometry))
    cfg.model.layer_spec = "te"
    assert [problem.partition(":")[0] for problem in vision_problems(cfg, geometry)] == ["model.layer_spec=te"]
    problem = next(model_problems(cfg.rollout, cfg.model, geometry, records_routes=False))
    assert problem.endswith("support yet; set rollout.engine=hf")


def test_the_first_stage_has_the_layers_that_images_speak_to(tmp_path: Path) -> None:
    cfg, geometry = Config(), read(tmp_path, QWEN)
    cfg.actor.layout.pp = 2
    assert not list(vision_problems(cfg, geometry))
    cfg.actor.layout.pp = 4
    [problem] = vision_problems(cfg, geometry)
    assert "the first pipeline stage has 1 layers, but image features are added to the first 2" in problem
    cfg.actor.layout.layers_per_stage = [2, 1, 1, 1]
    assert not list(vision_problems(cfg, geometry))
