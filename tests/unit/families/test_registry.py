"""Find families only by their modules. Each family rejects unsupported settings."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore import families
from rlhf_mcore.families import ARCHITECTURES, FAMILIES, HEADS
from rlhf_mcore.readers.model_files import inspect_model

PACKAGE = Path(families.__file__).resolve().parent.parent
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "v_head_dim": 16,
}
GLM_LITE = {**DEEPSEEK, "n_group": 1, "topk_group": 1}
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MINIMAX = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}
WINDOW = {"sliding_window": 16}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
GEMMA4: dict[str, Any] = {
    "attention_k_eq_v": True,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_global_key_value_heads": 1,
    "sliding_window": 16,
}


def test_no_module_but_a_familys_own_names_it() -> None:
    """The table of packages that vLLM's modules of some families import is an exception."""
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "rollout" / "vllm" / "limits.py"}:
        source = path.read_text()
        if path.parent.name != "families" and any(name in source for name in FAMILIES):  # parsing takes longer
            texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
            assert not texts & set(FAMILIES), path


def test_a_module_is_a_family_and_answers_to_every_head() -> None:
    assert list(FAMILIES) == [
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "ernie4_5",
        "exaone4",
        "gemma3",
        "gemma3_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_oss",
        "llama",
        "minimax_m2",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_5_vl",
        "qwen2_moe",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl",
        "qwen3_vl_moe",
        "seed_oss",
        "smollm3",
    ]
    assert len(ARCHITECTURES) == len(FAMILIES) * len(HEADS)
    assert ARCHITECTURES["Qwen2MoeForTokenClassification"] == (FAMILIES["qwen2_moe"], "token")
    for name, head in {"ForConditionalGeneration": "lm", "WithImagesForTokenClassification": "token"}.items():
        assert ARCHITECTURES[f"Qwen3_5{name}"] == (FAMILIES["qwen3_5"], head)
    for name, head in {"ForCausalLM": "lm", "ForTokenClassification": "token"}.items():
        assert ARCHITECTURES[f"Qwen3_5{name}"] == (FAMILIES["qwen3_5_text"], head)
    for name, family in FAMILIES.items():
        assert (PACKAGE / "families" / f"{name}.py").is_file() and family.name == name


def test_a_familys_module_has_less_than_30_lines() -> None:
    assert max(len((PACKAGE / "families" / f"{name}.py").read_text().splitlines()) for name in FAMILIES) < 30


def test_what_is_refused(tmp_path: Path) -> None:
    for architecture, change, message in [
        ("Llama", {"attention_bias": True}, "attention_bias is not supported for LlamaForCausalLM"),
        ("Qwen3", {"mlp_bias": True}, "mlp_bias is not supported for Qwen3ForCausalLM"),
        (
            "Qwen3Moe",
            {**EXPERTS, "shared_expert_intermediate_size": 8},
            "shared experts (shared_expert_intermediate_size)",
        ),
        ("Mixtral", {"num_local_experts": 4, "shared_expert_intermediate_size": 8}, "shared experts"),
        (
            "Mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 1},
            "num_experts_per_tok=1 with weights that add up",
        ),
        ("Qwen3Moe", {**EXPERTS, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is not between 1 and num_experts=4"),
        ("Qwen2Moe", {**EXPERTS, "qkv_bias": False}, "qkv_bias=false is not supported for Qwen2MoeForCausalLM"),
        (
            "Qwen2Moe",
            {**EXPERTS, "shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size=0, not an integer",
        ),
        ("Qwen2Moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 16}, "an active sliding_window 16"),
        ("Qwen3Moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 16}, "an active sliding_window 16"),
        ("Mistral", {"max_position_embeddings": 8192}, "an active sliding_window 4096"),
        ("Mixtral", {"num_local_experts": 4, "sliding_window": 16}, "an active sliding_window 16"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "sliding_window 16"),
        (
            "DeepseekV3",
            {**DEEPSEEK, "topk_method": None},
            "config.json has no topk_method, and engines default to another value",
        ),
        (
            "DeepseekV3",
            {**DEEPSEEK, "scoring_func": "softmax"},
            "scoring_func=softmax is not supported for DeepseekV3",
        ),
        ("DeepseekV3", {**DEEPSEEK, "norm_topk_prob": False}, "norm_topk_prob=false is not supported for DeepseekV3"),
        ("DeepseekV3", {**DEEPSEEK, "rope_interleave": False}, "rope_interleave=false is not supported"),
        (
            "DeepseekV3",
            {**DEEPSEEK, "topk_group": 3},
            "topk_group=3 is supported with num_experts_per_tok=6 only, not 4",
        ),
        (
            "DeepseekV3",
            {**DEEPSEEK, "n_group": 3},
            "n_group=3, topk_group=2: these groups cannot supply 4 of 8 experts",
        ),
        ("DeepseekV3", {**DEEPSEEK, "num_experts_per_tok": 1}, "num_experts_per_tok=1 is not between 2 and"),
        ("DeepseekV3", {**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq=2 is not supported, only 1"),
        ("DeepseekV3", {**DEEPSEEK, "qk_rope_head_dim": 7}, "qk_rope_head_dim=7, not an even number"),
        ("DeepseekV3", {**DEEPSEEK, "first_k_dense_replace": 3}, "first_k_dense_replace=3, not an integer from 0 to 2"),
        *(
            (name, {"partial_rotary_factor": 0.5}, f"partial_rotary_factor=0.5 is not supported for {name}ForCausalLM")
            for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Olmo2")
        ),
        (
            "Qwen3",
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25 is not supported for Qwen3ForCausalLM, whose heads rotate whole",
        ),
        ("DeepseekV3", {**DEEPSEEK, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("Gemma3", {**WINDOW, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            "GptOss",
            {**WINDOW, **EXPERTS, "rope_scaling": {"type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not supported",
        ),
        ("Llama", {"rotary_pct": 0.5}, "rotary_pct=0.5 is not supported for LlamaForCausalLM, only 1.0"),
        ("Llama", {"rope_parameters": {"full_attention": {"factor": 2.0}}}, "rope_parameters by kinds of layers"),
        (
            "Gemma3",
            {**WINDOW, "rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
            "rope type 'dynamic' is not supported",
        ),
        ("Llama", {"is_causal": False}, "is_causal=false is not supported for LlamaForCausalLM"),
        ("Llama", {"logit_scale": 0.25}, "logit_scale=0.25 is not supported for LlamaForCausalLM, only 1.0"),
        ("Qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config is not supported"),
        ("Qwen2", {"qk_norm": True}, "qk_norm is not supported for Qwen2ForCausalLM"),
        ("Qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        (
            "Qwen2",
            {"use_sliding_window": True, "max_window_layers": 1, "max_position_embeddings": 8192},
            "an active sliding_window 4096",
        ),
        (
            "Qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 512,
                "max_window_layers": 1,
                "max_position_embeddings": 512,
                "rope_scaling": {"type": "yarn", "factor": 4.0},
            },
            "an active sliding_window 512",
        ),
        ("DeepseekV3", {**DEEPSEEK, "rope_interleave": None}, "rope_interleave=null is not supported for DeepseekV3"),
        ("DeepseekV3", {**DEEPSEEK, "n_group": None}, "config.json has no n_group, for which"),
        ("Olmo2", {"attention_bias": True}, "attention_bias is not supported for Olmo2ForCausalLM"),
        (
            "DeepseekV2",
            {**DEEPSEEK, "topk_method": "noaux_tc"},
            "topk_method 'noaux_tc' is not supported, only 'greedy'",
        ),
        (
            "DeepseekV2",
            {**DEEPSEEK, "topk_method": "greedy", "norm_topk_prob": True},
            "norm_topk_prob is not supported",
        ),
        ("Gemma3", {**WINDOW, "final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported for Gemma3"),
        ("Gemma3", {**WINDOW, "hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported, only 'gelu_py"),
        ("Gemma3", {**WINDOW, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("Gemma3", {**WINDOW, "layer_types": ["chunked_attention"] * 2}, "layer_types has 'chunked_attention', which"),
        ("Gemma3", {**WINDOW, "layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers is 2"),
        ("Gemma3", {**WINDOW, "sliding_window": None}, "config.json has no sliding_window"),
        (
            "GptOss",
            {**WINDOW, **EXPERTS, "swiglu_alpha": 2.0},
            "swiglu_alpha=2.0 is not supported for GptOssForCausalLM",
        ),
        (
            "GptOss",
            {**WINDOW, **EXPERTS, "swiglu_limit": 1.5},
            "swiglu_limit=1.5 is not supported for GptOssForCausalLM",
        ),
        ("GptOss", {**WINDOW, **EXPERTS, "rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not supported for GptOss"),
        (
            "GptOss",
            {**WINDOW, **EXPERTS, "layer_types": ["full_attention", "sliding_attention"]},
            "full_attention in every layer of 2 only",
        ),
        ("GptOss", {**WINDOW, **EXPERTS, "attention_bias": False}, "attention_bias=false is not supported for GptOss"),
        (
            "GptOss",
            {**WINDOW, **EXPERTS, "quantization_config": {"quant_method": "awq"}},
            "config.json has quantization_config.quant_method='awq', not one of mxfp4, fp8, compressed-tensors; use the unq",
        ),
        (
            "Gemma3",
            {**WINDOW, "architectures": ["Gemma4ForConditionalGeneration"], "text_config": {}},
            "save its language",
        ),
        ("Qwen3_5", {"layer_types": ["mamba", "full_attention"]}, "layer_types has 'mamba', which is not supported"),
        ("Qwen3_5", {"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers is 2"),
        ("Qwen3_5", {"full_attention_interval": 3}, "layer_types has no full_attention"),
        (
            "Qwen3_5",
            {"linear_num_value_heads": 24},
            "linear_num_value_heads=24 is not a multiple of linear_num_key_heads=16",
        ),
        ("Qwen3Next", {**EXPERTS, "attention_bias": True}, "attention_bias is not supported for Qwen3NextForCausalLM"),
        ("Qwen3Next", {**EXPERTS, "linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0, not an integer from 1"),
        (
            "Glm4MoeLite",
            {**GLM_LITE, "first_k_dense_replace": 0},
            "first_k_dense_replace=0 differs from mlp_layer_types, which transformers reads",
        ),
        ("Glm4MoeLite", {**GLM_LITE, "mlp_layer_types": ["sparse"] * 2}, "first_k_dense_replace=1 differs from"),
        ("MiniMaxM2", {**MINIMAX, "use_routing_bias": None}, "config.json has no use_routing_bias"),
        ("MiniMaxM2", {**MINIMAX, "scoring_func": "softmax"}, "scoring_func=softmax is not supported"),
        ("MiniMaxM2", {**MINIMAX, "shared_intermediate_size": 64}, "shared_intermediate_size=64 is not supported"),
        ("Olmoe", {**EXPERTS, "norm_topk_prob": True}, "norm_topk_prob is not supported for OlmoeForCausalLM"),
        ("Olmoe", {**EXPERTS, "clip_qkv": 8.0}, "clip_qkv is not supported for OlmoeForCausalLM"),
        ("SmolLM3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        ("Exaone4", {"sliding_window": None}, "config.json has no sliding_window"),
        ("Exaone4", {**WINDOW, "layer_types": ["full_attention"] * 2}, 'add "sliding_window": null'),
        ("Gemma4", {**GEMMA4, "hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256 is not supported"),
        ("Gemma4", {**GEMMA4, "hidden_size_per_layer_input": None}, "config.json has no hidden_size_per_layer_input"),
        ("Gemma4", {**GEMMA4, "num_kv_shared_layers": 1}, "num_kv_shared_layers=1 is not supported for Gemma4"),
        ("Gemma4", {**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention is supported for"),
        (
            "Gemma4",
            {**GEMMA4, "layer_types": ["full_attention", "sliding_attention"]},
            "does not end with full_attention",
        ),
        (
            "Gemma4",
            {**GEMMA4, "num_global_key_value_heads": 3},
            "num_global_key_value_heads=3, not an integer from 1 to 2",
        ),
        (
            "Gemma4",
            {**GEMMA4, "per_layer_config": {"0": {"head_dim": 64}, "1": {"head_dim": 64}}},
            "per_layer_config must have head_dim and num_key_value_heads only, the same for all layers with full_attention",
        ),
        (
            "Gemma4",
            {**GEMMA4, "rope_parameters": {**GEMMA4_ROPE, "full_attention": {"rope_type": "default"}}},
            "full_attention with rope type 'default' or a factor is not supported",
        ),
        (
            "Gemma4",
            {**GEMMA4, "rope_parameters": {"full_attention": GEMMA4_ROPE["full_attention"]}},
            "has no rope_parameters.sliding_attention",
        ),
        ("Gemma4", {**GEMMA4, "partial_rotary_factor": 0.5}, "partial_rotary_factor is supported for full_attention"),
        (
            "Gemma4",
            {
                **GEMMA4,
                "rope_parameters": {
                    **GEMMA4_ROPE,
                    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                },
            },
            "partial_rotary_factor is supported for full_attention only",
        ),
        (
            "Gemma4",
            {
                **GEMMA4,
                "rope_parameters": {**GEMMA4_ROPE, "full_attention": {"rope_type": "proportional", "rope_theta": 0}},
            },
            "rope_parameters.full_attention.rope_theta=0, not a number from 1",
        ),
        (
            "Gemma4",
            {**GEMMA4, "per_layer_config": {"1": {"head_dim": 64, "rms_norm_eps": 0.5}}},
            "per_layer_config must have head_dim and num_key_value_heads only",
        ),
        ("Gemma4", {**GEMMA4, **GEMMA4_EXPERTS, "enable_moe_block": False}, "num_experts without enable_moe_block"),
        ("Gemma4", {**GEMMA4, **GEMMA4_EXPERTS, "top_k_experts": 1}, "top_k_experts=1 with weights that add up to one"),
        ("Llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6}}, "rope type 'proportional'"),
        ("Gemma", {}, "architecture GemmaForCausalLM is not supported; supported are: DeepseekV2ForCausalLM, "),
    ]:
        found = problems(tmp_path, {**CONFIG, "architectures": [f"{architecture}ForCausalLM"], **change})
        assert message in "\n".join(found)


def test_what_is_not_refused(tmp_path: Path) -> None:
    for architecture, change in [
        ("Mistral", {"max_position_embeddings": 4096}),
        ("Mistral", {"max_position_embeddings": 32768, "sliding_window": None}),  # as in Mistral 7B v0.3
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
        ("Qwen2", {"sliding_window": 16, "max_window_layers": 1}),
        ("Qwen2Moe", {**EXPERTS, "qkv_bias": True, "num_experts_per_tok": 1}),
        ("Qwen3Moe", {**EXPERTS, "sliding_window": 16}),
        ("DeepseekV3", DEEPSEEK),
        ("Qwen3Next", {**EXPERTS, "full_attention_interval": 2}),
        ("Qwen3_5Moe", {**EXPERTS, "full_attention_interval": 1, "intermediate_size": None}),
        ("DeepseekV2", {**DEEPSEEK, "topk_method": "group_limited_greedy", "topk_group": 3, "norm_topk_prob": False}),
        (
            "DeepseekV2",
            {**DEEPSEEK, "topk_method": "greedy", "n_group": 3, "norm_topk_prob": False},
        ),  # groups are ignored
        ("Gemma3", {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]}),
        ("GptOss", {**WINDOW, **EXPERTS}),
        ("DeepseekV3", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6}),  # as in Moonlight
        ("Glm4MoeLite", GLM_LITE),
        ("MiniMaxM2", MINIMAX),
        ("Olmo3", WINDOW),
        ("SmolLM3", {"no_rope_layers": [0, 1, 1]}),
        (
            "Exaone4",
            {"sliding_window": None, "sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 2},
        ),
        ("Gemma4", {**GEMMA4, "use_bidirectional_attention": "vision", "rope_parameters": GEMMA4_ROPE}),
        ("Gemma4", {**GEMMA4, **GEMMA4_EXPERTS}),
    ]:
        assert problems(tmp_path, {**CONFIG, "architectures": [f"{architecture}ForCausalLM"], **change}) == []


def test_a_model_with_a_vision_tower_is_told_once(tmp_path: Path) -> None:
    """The sizes of the language model are in text_config."""
    config = {"architectures": ["Glm4vMoeForConditionalGeneration"], "text_config": CONFIG, "vision_config": {}}
    (problem,) = problems(tmp_path, config)
    assert (
        "Glm4vMoeForConditionalGeneration is not supported because it is more than a language model; save its"
        in problem
    )


@pytest.mark.parametrize("name", ["model.language_model.embed_tokens.weight", "model.visual.patch_embed.proj.weight"])
def test_weights_of_a_vision_tower_are_told_beside_the_config_of_a_language_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["Qwen3ForCausalLM"]}))
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (problem,) = inspect_model(str(tmp_path), "model.path")[1]
    assert f"the weights contain more than a language model ({name}); save its language model alone" in problem


def problems(folder: Path, config: dict[str, Any]) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return inspect_model(str(folder), "model.path")[1]
