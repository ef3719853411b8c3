from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import AutoConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.geometry import GroupedSizes, ModelGeometry
from rlhf_mcore.mcore import model_spec
from rlhf_mcore.mcore.model_spec import fused_kernels, load_spec, transformer_config
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform.cpu import CpuPlatform
from rlhf_mcore.platform.cuda import CudaPlatform
from tests.distributed.models import make
from tests.messages import expect_error

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=3e-6,
)
FAMILIES: dict[str, tuple[str, type[PretrainedConfig], type[torch.nn.Module]]] = {
    "llama": ("LlamaForCausalLM", LlamaConfig, LlamaRotaryEmbedding),
    "mistral": ("MistralForCausalLM", MistralConfig, MistralRotaryEmbedding),
    "qwen2": ("Qwen2ForCausalLM", Qwen2Config, Qwen2RotaryEmbedding),
    "qwen3": ("Qwen3ForCausalLM", Qwen3Config, Qwen3RotaryEmbedding),
}
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
ROPES: dict[str, dict[str, Any]] = {
    "default": dict(rope_type="default", rope_theta=10000.0),
    "large theta": dict(rope_type="default", rope_theta=500000.0),
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    "llama3": dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "yarn": YARN,
    "yarn with a factor of its own": dict(**YARN, attention_factor=1.3),
    "yarn without attention scaling": dict(**YARN, attention_factor=1.0),
    "yarn with mscales": dict(**YARN, mscale=1.0, mscale_all_dim=0.5),
    "yarn with narrow ramps": dict(**YARN, beta_fast=16.0, beta_slow=2.0, truncate=False),
}


def write(directory: Path, family: str, **settings: Any) -> PretrainedConfig:
    """A model directory as far as its config is concerned."""
    architecture, config_class, _ = FAMILIES[family]
    window = dict(sliding_window=None) if family == "mistral" else {}
    config = config_class(**{**SIZES, **window, **settings}, architectures=[architecture])
    config.save_pretrained(directory)
    (directory / "model.safetensors").write_bytes(b"")
    return config


def config_for(directory: Path, layout: ParallelLayout, rank: int = 0, **changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = dict(dtype="fp32", recompute=RecomputeConfig(), fused=False, deterministic=False)
    groups: Any = SimpleNamespace(layout=layout, pp_rank=rank)
    return transformer_config(load_spec(directory), groups, CpuPlatform(), **{**settings, **changes})


# ------------------------------------------------------------------------------------------------------------ geometry
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_geometry_by_hand(tmp_path: Path, family: str, tied: bool) -> None:
    head_dim = {} if family == "qwen2" else dict(head_dim=32)
    write(tmp_path, family, tie_word_embeddings=tied, **head_dim)
    assert load_spec(tmp_path).geometry == ModelGeometry(
        family=family,
        num_layers=3,
        hidden_size=64,
        attention=GroupedSizes(4, 2, 16 if family == "qwen2" else 32),
        ffn_size=96,
        vocab_size=97,
        tied_embeddings=tied,
        max_positions=128,
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("head", "suffix"), [("token", "ForTokenClassification"), ("sequence", "ForSequenceClassification")]
)
def test_a_scalar_head_on_a_language_model_or_on_its_own(tmp_path: Path, family: str, head: str, suffix: str) -> None:
    write(tmp_path, family, tie_word_embeddings=True)
    on_model = load_spec(tmp_path, head, "critic.path")
    assert on_model.has_fresh_head and not load_spec(tmp_path).has_fresh_head
    assert on_model.geometry == replace(load_spec(tmp_path).geometry, head=head, tied_embeddings=False)
    name = FAMILIES[family][0].replace("ForCausalLM", suffix)
    assert on_model.config_updates["architectures"] == [name]
    content = json.loads((tmp_path / "config.json").read_text()) | on_model.config_updates
    (tmp_path / "config.json").write_text(json.dumps(content))
    saved = load_spec(tmp_path, head, "critic.path")
    assert saved.geometry == on_model.geometry and not saved.has_fresh_head
    assert saved.config_updates["architectures"] == [name]
    # transformers builds from it a model with one label, whose head does not drop out.
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.num_labels == 1
    with torch.device("meta"):
        model = getattr(transformers, name)(config).train()
    assert tuple(model.score.weight.shape) == (1, 64)
    assert (model.score.bias is not None) == (head == "token")
    if head == "token":
        assert model.dropout.p == 0.0


def test_a_language_model_is_saved_as_what_it_is(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    assert load_spec(tmp_path).config_updates == {}


@pytest.mark.parametrize(
    ("has", "wanted"),
    [
        ("ForTokenClassification", "lm"),
        ("ForTokenClassification", "sequence"),
        ("ForSequenceClassification", "lm"),
        ("ForSequenceClassification", "token"),
    ],
)
def test_another_scalar_head_is_refused(tmp_path: Path, has: str, wanted: str) -> None:
    write(tmp_path, "qwen3")
    content = json.loads((tmp_path / "config.json").read_text()) | {"architectures": [f"Qwen3{has}"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"critic.path=.*: architecture Qwen3{has} is not supported"):
        load_spec(tmp_path, wanted, "critic.path")


def test_a_config_without_a_head_dim_has_hidden_over_heads(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    content = json.loads((tmp_path / "config.json").read_text())
    content.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    spec = load_spec(tmp_path)
    assert spec.geometry.head_dim == 16 and len(spec.inv_freq) == 8


# -------------------------------------------------------------------------------------------------------------- rotary
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_frequencies_and_scaling_are_those_of_transformers(tmp_path: Path, family: str, rope: str) -> None:
    config = write(tmp_path, family, rope_parameters=dict(ROPES[rope]))
    expected = FAMILIES[family][2](config)
    spec = load_spec(tmp_path)
    assert torch.equal(spec.inv_freq, expected.inv_freq)
    assert spec.rope_scale == expected.attention_scaling
    # What Megatron's attention multiplies sines and cosines by.
    found = _yarn_get_concentration_factor_from_config(config_for(tmp_path, ParallelLayout(1)))
    assert found == pytest.approx(float(expected.attention_scaling), rel=1e-12)


def test_default_frequencies_by_hand(tmp_path: Path) -> None:
    write(tmp_path, "llama", head_dim=8, rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    assert load_spec(tmp_path).inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    write(tmp_path, "llama", head_dim=8, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0))
    assert load_spec(tmp_path).inv_freq.tolist() == pytest.approx([0.5, 0.05, 0.005, 0.0005])


def test_the_older_way_to_write_a_scaling_is_read(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    content = json.loads((tmp_path / "config.json").read_text())
    content.pop("rope_parameters")
    content |= dict(rope_theta=10000.0, head_dim=8, rope_scaling=dict(type="linear", factor=4.0))
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert load_spec(tmp_path).inv_freq.tolist() == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


# ------------------------------------------------------------------------------------------------------------ refusals
def test_a_rotary_factor_that_megatron_cannot_express_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", rope_parameters=dict(**YARN, attention_factor=0.5))
    with expect_error(ConfigError, field=("model.path", "rotary attention factor"), value="0.5"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architectures=["GPT2LMHeadModel"]), "architecture GPT2LMHeadModel is not supported"),
        (dict(architectures=None), "architecture none is not supported"),
        (dict(auto_map={"AutoConfig": "x.Y"}, model_type="own"), "auto_map"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (dict(attention_bias=True), "attention_bias is not supported"),
        (dict(mlp_bias=True), "mlp_bias is not supported"),
        (dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "rope type 'dynamic' is not supported"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, "llama")
    content = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        load_spec(tmp_path)


# ------------------------------------------------------------------------------------------------- TransformerConfig
def test_sizes_arrive_in_megatrons_config(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", head_dim=32)
    config = config_for(tmp_path, ParallelLayout(4, tp=2, pp=2, sequence_parallel=True), dtype="bf16")
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (3, 64, 96)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (4, 2, 32)
    assert config.layernorm_epsilon == 3e-6 and config.normalization == "RMSNorm"
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (2, 2)
    assert config.sequence_parallel and config.bf16 and not config.fp16
    assert config.params_dtype == config.pipeline_dtype == torch.bfloat16
    assert config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    assert config.hidden_dropout == config.attention_dropout == 0.0


@pytest.mark.parametrize(
    ("family", "bias", "norm"),
    [("llama", False, False), ("mistral", False, False), ("qwen2", True, False), ("qwen3", False, True)],
)
def test_what_the_families_differ_in(tmp_path: Path, family: str, bias: bool, norm: bool) -> None:
    write(tmp_path, family)
    config = config_for(tmp_path, ParallelLayout(1))
    assert (config.add_qkv_bias, config.qk_layernorm, config.add_bias_linear) == (bias, norm, False)


def test_megatron_neither_divides_the_loss_nor_mixes_interleaved_messages_nor_waits_for_messages(
    tmp_path: Path,
) -> None:
    write(tmp_path, "llama", num_hidden_layers=4)
    plain = config_for(tmp_path, ParallelLayout(2, pp=2))
    interleaved = config_for(tmp_path, ParallelLayout(2, pp=2, vpp=2))
    assert plain.calculate_per_token_loss and interleaved.calculate_per_token_loss
    assert (plain.batch_p2p_comm, plain.overlap_p2p_comm, plain.variable_seq_lengths) == (True, False, True)
    assert not plain.batch_p2p_sync
    assert (interleaved.batch_p2p_comm, interleaved.overlap_p2p_comm) == (False, True)
    assert not config_for(tmp_path, ParallelLayout(1)).variable_seq_lengths


def test_uneven_stages_reach_megatron_without_its_globals(tmp_path: Path) -> None:
    """Stage 0 has layers 0 and 2, one in each chunk; stage 1 has layer 1 and, in its second chunk, layers 3 and 4."""
    write(tmp_path, "llama", num_hidden_layers=5)
    layout = ParallelLayout(2, pp=2, vpp=2, layers_per_stage=(1, 1, 1, 2))
    found = []
    for rank in (0, 1):
        config = config_for(tmp_path, layout, rank=rank)
        for chunk in (0, 1):
            offset = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=rank)
            found.append((rank, chunk, offset, get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank)))
    assert found == [(0, 0, 0, 1), (0, 1, 2, 1), (1, 0, 1, 1), (1, 1, 3, 2)]


def test_recomputation(tmp_path: Path) -> None:
    write(tmp_path, "llama")

    def of(granularity: str) -> tuple[Any, ...]:
        cfg = RecomputeConfig(granularity=granularity, num_layers=2)
        config = config_for(tmp_path, ParallelLayout(1), recompute=cfg)
        return config.recompute_granularity, config.recompute_method, config.recompute_num_layers

    assert of("off") == (None, None, None)
    assert of("selective") == ("selective", None, None)
    assert of("full") == ("full", "uniform", 2)
    assert of("block") == ("full", "block", 2)


@pytest.mark.parametrize(("model", "cp", "kind"), [("gpt_oss", 2, "a2a"), ("gpt_oss", 1, None), ("qwen3_moe", 2, None)])
def test_windows_and_sinks_are_not_exchanged_in_a_ring(tmp_path: Path, model: str, cp: int, kind: str | None) -> None:
    make(model, tmp_path)
    config = config_for(tmp_path, ParallelLayout(cp, cp=cp), fused=True)
    assert config.cp_comm_type == kind


# ------------------------------------------------------------------------------------------------------- fused kernels
ROPE, PERMUTE = "fused_apply_rotary_pos_emb_thd", ("fused_permute_with_probs", "fused_sort_chunks_by_index_with_probs")


@pytest.fixture
def fake_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine and apex, as far as Megatron and this project look for them."""
    for name in (ROPE, "fused_apply_rotary_pos_emb"):
        monkeypatch.setattr(rope_utils, name, object())
    for name in (*PERMUTE, "fused_permute", "fused_sort_chunks_by_index", "fused_unpermute"):
        monkeypatch.setattr(
            moe_utils, name, object(), raising=False
        )  # names that are there with Transformer Engine only
    monkeypatch.setattr(model_spec, "find_spec", lambda name: object())


def _find_fusions(directory: Path, platform: Any, fused: bool = True, **overrides: Any) -> tuple[bool, bool]:
    groups: Any = SimpleNamespace(layout=ParallelLayout(1), pp_rank=0)
    settings: dict[str, Any] = dict(dtype="bf16", recompute=RecomputeConfig(), deterministic=False)
    found = transformer_config(
        load_spec(directory), groups, platform, fused=fused, overrides=Overrides(values=overrides), **settings
    )
    return found.apply_rope_fusion, found.gradient_accumulation_fusion


def test_fused_kernels_are_the_default_where_they_are_installed(tmp_path: Path, fake_packages: None) -> None:
    write(tmp_path, "llama", head_dim=32)
    assert _find_fusions(tmp_path, CudaPlatform()) == (True, True)
    assert _find_fusions(tmp_path, CudaPlatform(), apply_rope_fusion=False) == (False, True)
    assert (
        _find_fusions(tmp_path, CudaPlatform(), fused=False) == _find_fusions(tmp_path, CpuPlatform()) == (False, False)
    )
    assert fused_kernels(load_spec(tmp_path))["moe_permute_fusion"] is False  # there are no experts


def test_a_factor_of_yarn_is_not_lost_in_a_fused_rotation(tmp_path: Path, fake_packages: None) -> None:
    write(tmp_path, "qwen2", rope_parameters=YARN)
    assert _find_fusions(tmp_path, CudaPlatform()) == (False, True)


def test_without_their_packages_there_are_none(tmp_path: Path) -> None:
    write(tmp_path, "llama", head_dim=32)
    assert not any(fused_kernels(load_spec(tmp_path)).values())
