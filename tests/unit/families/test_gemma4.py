"""Gemma 4: the language model of a published directory can be saved alone, and its cache is counted by kind of layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Gemma4Config, Gemma4ForCausalLM, Gemma4ForConditionalGeneration

from rlhf_mcore.bridge.map.rules import hf_shapes, row_runs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.geometry import AdapterSizes
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.planning.counts import model_flops
from rlhf_mcore.planning.engines import kv_bytes_per_token
from rlhf_mcore.planning.inputs import EngineGrid
from rlhf_mcore.readers.model_files import read_geometry
from rlhf_mcore.rollout.vllm.limits import adapter_problems
from tests.distributed.models import GEMMA4, SIZES

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
TOWER = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    patch_size=4,
    position_embedding_size=64,
)


def test_the_language_model_is_saved_alone(tmp_path: Path) -> None:
    """Follow the recipe of docs/models/supported.md."""
    text = {**SIZES, **GEMMA4, "pad_token_id": 0}
    whole = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=TOWER)).eval()
    whole.save_pretrained(tmp_path / "whole")
    model = Gemma4ForCausalLM.from_pretrained(tmp_path / "whole", key_mapping={r"^model\.language_model\.": "model."})
    model.save_pretrained(tmp_path / "text", save_original_format=False)
    token_ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(token_ids).logits, whole(token_ids).logits)
    found = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "text" / "model.safetensors").items()}
    assert found == hf_shapes(load_spec(tmp_path / "text").geometry)


def test_megatrons_formats_are_rejected() -> None:
    """Their settings contain one size for the heads of all layers."""
    geometry = read_geometry(MODELS / "Gemma-4-31B", "lm")
    with pytest.raises(ConfigError, match="two kinds of attention heads are not supported; convert from or to hf only"):
        row_runs("decoder.layers.0.self_attention.linear_proj.weight", geometry)


def test_vllm_gets_merged_weights_instead_of_adapters() -> None:
    sizes = AdapterSizes(8, 16.0, ("k_proj",))
    geometry = replace(read_geometry(MODELS / "Gemma-4-31B", "lm"), adapter=sizes)
    (problem,) = adapter_problems(RolloutConfig(), geometry)
    assert "does not add the adapters of keys to values" in problem


def test_plans_count_keys_and_pairs_by_kind_of_layer() -> None:
    """31B has 50 layers with 16 key heads of 256 and a window of 1,024 tokens, and 10 layers with 4 key heads of 512."""
    geometry = read_geometry(MODELS / "Gemma-4-31B", "lm")
    assert kv_bytes_per_token(geometry, EngineGrid(tp=1, pp=1, dp=1, ep=1), 2) == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    # tp=8: two key heads of 256, and one of 512, which two ranks share.
    assert kv_bytes_per_token(geometry, EngineGrid(tp=8, pp=1, dp=1, ep=1), 2) == 2 * 2 * (50 * 2 * 256 + 10 * 512)
    flops = model_flops(geometry)
    assert (flops.window_pair, flops.pair, flops.window) == (50 * 4 * 32 * 256, 10 * 4 * 32 * 512, 1024)
