"""Build small Hugging Face models: every family, tied and untied embeddings, odd vocabularies, rotary scaling."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_rope3": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, dict(head_dim=None, hidden_size=128, tie_word_embeddings=True)),
    "qwen2_yarn": (Qwen2ForCausalLM, Qwen2Config, dict(head_dim=None, hidden_size=128, rope_parameters=YARN_ROPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3_tied": (Qwen3ForCausalLM, Qwen3Config, dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "qwen3_seven": (Qwen3ForCausalLM, Qwen3Config, dict(tie_word_embeddings=True, num_hidden_layers=7)),
}
QWEN_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True)
DELTA_NET = dict(
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,  # vLLM's CPU kernels need 64 or 128, for values too
    linear_value_head_dim=64,
    full_attention_interval=2,
)
# Different head sizes, groups of experts, two shared experts, and fields that vLLM reads and transformers does not.
DEEPSEEK = dict(
    q_lora_rank=24,
    kv_lora_rank=40,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
    head_dim=None,
    num_key_value_heads=4,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    moe_intermediate_size=48,
    routed_scaling_factor=2.5,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    rope_parameters={**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.2},
)
SPACES = dict(
    layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=4,
    ssm_state_size=32,
    chunk_size=16,
    n_routed_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=48,
    moe_shared_expert_intermediate_size=80,
    routed_scaling_factor=2.5,
    layer_norm_epsilon=1e-6,
)
MOE_MODELS = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, QWEN_EXPERTS),
    # Dense layers too, and expert weights that do not add up to one.
    "qwen3_moe_mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**QWEN_EXPERTS, "mlp_only_layers": [2], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            **QWEN_EXPERTS,
            "head_dim": None,
            "hidden_size": 128,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig, dict(num_local_experts=4, num_experts_per_tok=2)),
}
GEMMA4 = dict(
    sliding_window=5,
    layer_types=["sliding_attention", "full_attention"] * 2,
    global_head_dim=64,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=0,
    final_logit_softcapping=4.0,
    pad_token_id=None,
)
# Families that are tested on a few layouts (family_worker.py).
FURTHER_MODELS = {
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, DEEPSEEK),
    # An indexer that selects fewer keys than the tests' sequences have. With few heads, many scores would be zero, and equal
    # scores are selected in any order.
    "deepseek_v32": (
        DeepseekV32ForCausalLM,
        DeepseekV32Config,
        {**DEEPSEEK, "index_n_heads": 16, "index_head_dim": 24, "index_topk": 4},
    ),
    # The indexer rotates neighbours. Layer 3 uses the keys that layer 2 selects, and layers 0 and 1 have indexers too.
    "glm_moe_dsa": (
        GlmMoeDsaForCausalLM,
        GlmMoeDsaConfig,
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "index_n_heads": 16,
            "index_head_dim": 24,
            "index_topk": 4,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 3,
            "indexer_rope_interleave": True,
        },
    ),
    # Moonlight's settings: queries without a latent, one group, no rotary scaling, and an epsilon that differs from
    # the epsilon of the latents' norms.
    "deepseek_v3_direct": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": None, "rms_norm_eps": 1e-5},
    ),
    # Kimi-K2's settings: one group, several dense layers, and a rotary scaling that scales only the softmax.
    "deepseek_v3_kimi": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "rope_parameters": {**YARN_ROPE, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    # Groups are ranked by their best expert, not by the sum of their two best experts.
    "deepseek_v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            **DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig,
        dict(
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            routed_scaling_factor=1.5,
        ),
    ),
    # Fewer key heads than ranks, with one norm over all heads.
    "olmo2": (
        Olmo2ForCausalLM,
        Olmo2Config,
        dict(head_dim=None, hidden_size=128, pad_token_id=None, eos_token_id=1),
    ),
    # Sliding windows narrower than the sequences, and one layer with full attention and rotary scaling.
    "gemma3_text": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        dict(
            sliding_window=5,
            sliding_window_pattern=3,
            query_pre_attn_scalar=24,
            pad_token_id=None,
            rope_parameters={
                "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                "sliding_attention": dict(rope_type="default", rope_theta=1e4),
            },
        ),
    ),
    # Layers with full attention have one key head of another size, whose projection is also the values. Logits are bounded.
    "gemma4_text": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4),
    "gemma4_text_moe": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    ),
    # Sinks and sliding windows with rotary scaling. The biases are so large that the clamp takes effect.
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        dict(
            sliding_window=5,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=128,  # vLLM's CPU kernel needs at least 32 on every rank
            rms_norm_eps=1e-5,
            rope_parameters={**YARN_ROPE, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        ),
    ),
    # Latent attention without groups of experts, with two dense layers and the head sizes of GLM-4.7-Flash.
    "glm4_moe_lite": (
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig,
        {
            **{key: value for key, value in DEEPSEEK.items() if key not in ("topk_method", "scoring_func")},
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rope_parameters": dict(rope_type="default", rope_theta=1e4),
        },
    ),
    # Half of each head rotates, as ``rotary_dim`` says. One norm over all heads, and fewer key heads than ranks.
    "minimax_m2": (
        MiniMaxM2ForCausalLM,
        MiniMaxM2Config,
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            rotary_dim=16,
            scoring_func="sigmoid",
            use_routing_bias=True,
        ),
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig,
        dict(
            head_dim=None,
            hidden_size=128,
            num_experts=4,
            num_experts_per_tok=2,
            rms_norm_eps=1e-5,
            pad_token_id=None,
            eos_token_id=1,
        ),
    ),
    # Sliding windows without the scaling of the layers with full attention, which multiplies sines and cosines.
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config,
        dict(
            head_dim=None,
            hidden_size=128,
            sliding_window=5,
            pad_token_id=None,
            eos_token_id=1,
            rope_parameters={
                "full_attention": {**YARN_ROPE, "attention_factor": 1.2},
                "sliding_attention": dict(rope_type="default", rope_theta=1e4),
            },
        ),
    ),
    "seed_oss": (SeedOssForCausalLM, SeedOssConfig, dict(attention_dropout=0.0, pad_token_id=None)),
    "ernie4_5": (Ernie4_5ForCausalLM, Ernie4_5Config, dict(tie_word_embeddings=True)),
    # The second and the fourth layer do not rotate.
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config,
        dict(head_dim=None, hidden_size=128, pad_token_id=None, no_rope_layers=[1, 0, 1, 0]),
    ),
    # Sliding windows, and one layer with full attention that does not rotate.
    "exaone4": (
        Exaone4ForCausalLM,
        Exaone4Config,
        dict(sliding_window=5, pad_token_id=None, rope_parameters=LLAMA3_ROPE),
    ),
    # Without windows, layers with full attention rotate.
    "exaone4_full": (
        Exaone4ForCausalLM,
        Exaone4Config,
        dict(sliding_window=None, layer_types=["full_attention"] * 4, pad_token_id=None, tie_word_embeddings=True),
    ),
    # Files stack queries, keys and values, and gate and up matrices. Three quarters of each head rotate.
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config,
        dict(
            head_dim=None,
            hidden_size=128,
            pad_token_id=None,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75),
        ),
    ),
    # Gate and up matrices are stacked, fewer key heads than ranks, and norms around blocks.
    "glm4": (Glm4ForCausalLM, Glm4Config, dict(num_key_value_heads=1, pad_token_id=None, eos_token_id=1)),
    # Every kind of block, with several heads per group.
    "nemotron_h": (NemotronHForCausalLM, NemotronHConfig, SPACES),
    # Without experts, and with groups that context-parallel ranks share unevenly.
    "nemotron_h_dense": (
        NemotronHForCausalLM,
        NemotronHConfig,
        {
            **SPACES,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 6,
            "n_groups": 2,
        },
    ),
    # Heads as large as in the published models, because vLLM's CPU kernels support no other sizes.
    "deepseek_v3_heads": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {**DEEPSEEK, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    ),
    # Gated delta nets with more value heads than key heads, gated attention, and a rotation of a quarter of each head.
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**QWEN_EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 80},
    ),
    # The same with a separate projection for each input of a delta net, and as many value heads as key heads.
    "qwen3_5_text": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {**DELTA_NET, "linear_num_value_heads": 4, "tie_word_embeddings": True},
    ),
    # Heads that four context-parallel ranks share unevenly: two key heads, each with three value heads of another size.
    "qwen3_5_moe_text": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {
            **QWEN_EXPERTS,
            **DELTA_NET,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 32,
            "shared_expert_intermediate_size": 80,
        },
    ),
    # A model without experts does not require sequence parallelism.
    "deepseek_v3_dense": (DeepseekV3ForCausalLM, DeepseekV3Config, {**DEEPSEEK, "first_k_dense_replace": 4}),
}


def make(name: str, directory: Path, seed: int = 0, **changes: object) -> torch.nn.Module:
    """Write a model with random weights, including biases and norms, and return it (fp32, eval mode)."""
    model_class, config_class, extra = {**MODELS, **MOE_MODELS, **FURTHER_MODELS}[name]
    settings = {**SIZES, **extra, **changes}
    if settings.get("head_dim", 0) is None:
        del settings["head_dim"]
    config: PretrainedConfig = config_class(**settings)
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                adds_one = name.startswith(("gemma3", "qwen3_next", "qwen3_5")) and "linear_attn" not in parameter_name
                is_factor = "norm" in parameter_name or parameter_name.endswith("scale")
                centre = 1.0 if is_factor and not adds_one else 0.0
                parameter.copy_(torch.randn_like(parameter) * 0.2 + centre)
            else:
                scale = 4.0 if parameter_name.endswith("gate_up_proj_bias") else 0.1
                parameter.copy_(torch.randn_like(parameter) * scale)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
            elif buffer_name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    model.save_pretrained(directory)
    return model


# The decoders are the models above. Towers read images of a few patches, have cut windows, and two levels of DeepStack.
IMAGE_TOKEN = 90
_TOWER = dict(
    depth=3,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
)
_IDS = dict(image_token_id=IMAGE_TOKEN, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
_SQUARE = dict(image_token_index=IMAGE_TOKEN, boi_token_index=92, eoi_token_index=93, mm_tokens_per_image=9)
VISION_MODELS: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        dict(head_dim=None, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2),
        dict(fullatt_block_indexes=[1], window_size=16),
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        dict(tie_word_embeddings=False),
        dict(num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig,
        dict(tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
        dict(num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
    ),
    "qwen3_5": (
        Qwen3_5ForConditionalGeneration,
        Qwen3_5Config,
        dict(tie_word_embeddings=True, **DELTA_NET),
        dict(num_position_embeddings=16),
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForConditionalGeneration,
        Qwen3_5MoeConfig,
        {**QWEN_EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 80, "tie_word_embeddings": False},
        dict(num_position_embeddings=16),
    ),
    # Images of nine tokens, more than a window contains.
    "gemma3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        {**FURTHER_MODELS["gemma3_text"][2], "tie_word_embeddings": True},
        dict(num_hidden_layers=3, num_attention_heads=4, image_size=24, vision_use_head=False),
    ),
}
# Qwen3.5 rotates a quarter of each head.
_SECTIONS = {"qwen2_5_vl": [2, 3, 3], "qwen3_vl": [6, 5, 5], "qwen3_vl_moe": [6, 5, 5], "qwen3_5": [2, 1, 1]}
_SECTIONS["qwen3_5_moe"] = _SECTIONS["qwen3_5"]


def make_with_tower(name: str, directory: Path, seed: int = 0) -> torch.nn.Module:
    """Build and save a model that reads images."""
    model_class, config_class, changes, tower = VISION_MODELS[name]
    text = {
        **SIZES,
        "rope_parameters": dict(rope_type="default", rope_theta=1e4, mrope_section=_SECTIONS.get(name)),
        **changes,
    }
    if text["head_dim"] is None:
        del text["head_dim"]
    vision = {**_TOWER, **tower, "out_hidden_size": SIZES["hidden_size"]}
    tied = changes["tie_word_embeddings"]
    ids = _SQUARE if name == "gemma3" else _IDS
    config = config_class(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids)
    torch.manual_seed(seed)
    model: torch.nn.Module = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                adds_one = name in ("qwen3_5", "qwen3_5_moe", "gemma3") and "linear_attn" not in parameter_name
                adds_one &= ".language_model." in parameter_name or "mm_soft_emb" in parameter_name
                centre = ("norm" in parameter_name or "ln_q" in parameter_name) and not adds_one
                parameter.copy_(torch.randn_like(parameter) * 0.2 + centre)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    as_published(directory)
    return model


def image_arguments(token_ids: torch.Tensor, images: Sequence[Any], *, squares: bool = False) -> dict[str, Any]:
    """Return the arguments of transformers' models for rows [b, T]. ``images``: patches for all image tokens of the rows."""
    if not images:
        return {}
    kinds, patches = (token_ids == IMAGE_TOKEN).int(), torch.stack if squares else torch.cat
    pixels = patches([image.pixel_values for image in images])
    if squares:
        return {"pixel_values": F.fold(pixels.mT, (24, 24), kernel_size=4, stride=4), "token_type_ids": kinds}
    grids = torch.tensor([image.grid_thw for image in images])
    return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}


def as_published(directory: Path) -> None:
    """Rewrite a directory as its authors publish it: experts in one tensor, inputs before outputs, and SigLIP's full names.

    transformers saves its own layout instead.
    """
    file = directory / "model.safetensors"
    tensors, inputs = (
        load_file(file),
        {"gate_up_proj": SIZES["hidden_size"], "down_proj": QWEN_EXPERTS["moe_intermediate_size"]},
    )
    for name, tensor in tensors.items():
        if (matrix := name.rpartition(".")[2]) in inputs and tensor.size(1) != inputs[matrix]:
            tensors[name] = tensor.mT.contiguous()
    tensors = {
        re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): t for name, t in tensors.items()
    }
    save_file(tensors, file, {"format": "pt"})


def pack(directory: Path, seed: int = 0) -> None:
    """Replace the experts of a gpt-oss model by random experts in mxfp4, the published format."""
    generator, file = torch.Generator().manual_seed(seed), directory / "model.safetensors"

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = numbers(0, 256, experts, columns, rows // 32, 16)
        tensors[f"{name}_scales"] = numbers(121, 125, experts, columns, rows // 32)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))


def add_mtp_layer(directory: Path, layers: int = 4, count: int = 1) -> dict[str, torch.Tensor]:
    """Add an MTP layer in bf16, as in DeepSeek-V3 and GLM-4.5, to a saved model of ``layers`` layers. Returns its tensors.

    ``count``: number of this MTP layer in the model, from 1.
    """
    path, config = directory / "model.safetensors", directory / "config.json"
    held = load_file(path)
    last, prefix = f"model.layers.{layers - 1}.", f"model.layers.{layers + count - 1}."
    before = f"model.layers.{layers - 2}."  # an MTP layer has an indexer, even if the last layer does not
    hidden, vocabulary = held["model.norm.weight"].numel(), held["model.embed_tokens.weight"]
    made = {
        prefix + name.removeprefix(before): held[name] for name in held if name.startswith(f"{before}self_attn.indexer")
    }
    made |= {prefix + name.removeprefix(last): tensor for name, tensor in held.items() if name.startswith(last)}
    made |= {f"{prefix}{name}.weight": held["model.norm.weight"] for name in ("enorm", "hnorm", "shared_head.norm")}
    made |= {f"{prefix}{name}.weight": vocabulary for name in ("embed_tokens", "shared_head.head")}
    made[f"{prefix}eh_proj.weight"] = torch.zeros(hidden, 2 * hidden)
    made = {name: (tensor + torch.randn_like(tensor) * 0.1).bfloat16() for name, tensor in made.items()}
    save_file({**held, **made}, path, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": count}))
    return made
