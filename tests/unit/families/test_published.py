"""Read published config.json files. Their models have as many parameters as transformers builds, or a stated problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.readers.model_files import inspect_model

PUBLISHED = Path(__file__).parents[3] / "configs" / "models"
# Keys of the files on the Hugging Face hub that affect tensors or computation, and keys that are new to a family.
QWEN3_6: dict[str, Any] = {  # Qwen3.8-27B has the same values
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "language_model_only": False,
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "model_type": "qwen3_5",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 5120,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
GLM_4_7: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}
SMOLLM3: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
OLMO_3: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}
# Without windows, and with a pattern of windows that transformers ignores.
EXAONE_1_2B: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "layer_types": ["full_attention"] * 30,
    "max_position_embeddings": 65536,
    "num_attention_heads": 32,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000,
    "sliding_window": None,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": True,
    "vocab_size": 102400,
}
# Keys of nvidia/MiniMax-M2.7-NVFP4. The other keys equal MiniMax-M2.
NVFP4 = {"quantization_config": {"quant_algo": "NVFP4", "quant_method": "modelopt"}}
MINIMAX = json.loads((PUBLISHED / "MiniMax-M2" / "config.json").read_text())
EXAONE_32B = json.loads((PUBLISHED / "EXAONE-4.0-32B" / "config.json").read_text())
# Two indexers follow the first one. Then each indexer selects for four layers.
GLM_5_2 = json.loads((PUBLISHED / "GLM-5.2" / "config.json").read_text())
NEMOTRON_3 = json.loads((PUBLISHED / "Nemotron-3-Nano-30B-A3B" / "config.json").read_text())


def inspect(folder: Path, config: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return inspect_model(str(folder), "model.path")


@pytest.mark.parametrize(
    "config",
    [QWEN3_6, GLM_4_7, GLM_5_2, SMOLLM3, OLMO_3, EXAONE_32B, EXAONE_1_2B, NEMOTRON_3],
    ids=["Qwen3.6", "GLM-4.7", "GLM-5.2", "SmolLM3", "OLMo-3", "EXAONE-32B", "EXAONE-1.2B", "Nemotron-3"],
)
def test_a_published_config_is_read_as_transformers_reads_it(tmp_path: Path, config: dict[str, Any]) -> None:
    geometry, problems = inspect(tmp_path, config)
    assert problems == []
    built = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = built.from_config(AutoConfig.from_pretrained(tmp_path))
    biases = [held for name, held in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert num_parameters(geometry) == sum(tensor.numel() for tensor in (*model.parameters(), *biases))


@pytest.mark.parametrize(
    ("config", "change", "problem"),
    [
        (MINIMAX, NVFP4, "quant_method='modelopt'"),
        (GLM_4_7, {"architectures": ["Glm5ForCausalLM"]}, "architecture Glm5ForCausalLM is not supported"),
        (GLM_5_2, {"index_topk_freq": 1}, "indexer_types has 'shared' for layer 3, but engines read 'full'"),
        (
            GLM_5_2,
            {"index_topk_pattern": "F" * 77 + "S"},
            "for layer 3, but engines read 'full' from index_topk_pattern",
        ),
        (GLM_5_2, {"indexer_types": ["shared"] * 78}, "indexer_types must contain"),
        (GLM_5_2, {"indexer_rope_interleave": False}, "indexer_rope_interleave=False is not supported"),
        (GLM_5_2, {"mlp_layer_types": ["sparse"] * 78}, "first_k_dense_replace=3 differs from mlp_layer_types"),
        (NEMOTRON_3, {"moe_latent_size": 1024}, "moe_latent_size is not supported"),
        (NEMOTRON_3, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        (NEMOTRON_3, {"time_step_limit": [0.0, 0.1]}, "time_step_limit=[0.0, 0.1] is not supported"),
        (NEMOTRON_3, {"hybrid_override_pattern": "MEM?"}, "'MEM?', not made of M, *, -, E only"),
        (
            QWEN3_6,
            {"text_config": {**QWEN3_6["text_config"], "output_gate_type": "sigmoid"}},
            "output_gate_type=sigmoid is not supported",
        ),
    ],
)
def test_another_config_is_rejected_for_a_stated_reason(
    tmp_path: Path, config: dict[str, Any], change: dict[str, Any], problem: str
) -> None:
    assert problem in "\n".join(inspect(tmp_path, {**config, **change})[1])
