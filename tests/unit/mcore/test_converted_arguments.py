"""Build the trained model from the arguments in a converted checkpoint, read like Megatron-LM and Megatron-Bridge read them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.safe_globals import SAFE_GLOBALS
from megatron.core.transformer import TransformerConfig

from rlhf_mcore.commands.convert.command import main
from rlhf_mcore.parallel.layout import ParallelLayout
from tests.distributed.models import make
from tests.unit.mcore.test_model_spec import config_for

SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization",
    "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "hidden_dropout", "attention_dropout",
    "layernorm_epsilon", "num_moe_experts",
)  # fmt: skip
SAME_OF_EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "softmax_type",
    "window_size",
    "window_attn_skip_freq",
    "glu_linear_offset",
    "activation_func_clamp_value",
)


def config_from(args: Namespace) -> TransformerConfig:
    """Convert arguments like both loaders: fields with equal names first, then renamed arguments."""
    assert args.swiglu != args.quick_geglu and args.group_query_attention and not args.multi_latent_attention
    names = {field.name for field in fields(TransformerConfig)}
    settings = {name: value for name, value in vars(args).items() if name in names}
    settings |= dict(
        layernorm_epsilon=args.norm_epsilon,
        num_moe_experts=args.num_experts,
        activation_func=F.silu if args.swiglu else quick_gelu,
        gated_linear_unit=True,
        bias_activation_fusion=args.bias_swiglu_fusion,
        pipeline_dtype=args.params_dtype,
        persist_layer_norm=not args.no_persist_layer_norm,
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
        batch_p2p_comm=not args.overlap_p2p_comm,
        cp_comm_type=args.cp_comm_type[0],
    )
    return TransformerConfig(**settings)


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "qwen3_tied", "phi3", "glm4", "qwen3_moe", "qwen3_moe_mixed", "qwen2_moe", "mixtral", "gpt_oss"],
)
def test_the_arguments_describe_the_model(tmp_path: Path, name: str) -> None:
    make(name, tmp_path / "hf")
    assert main(["--from", "hf", "--to", "megatron", str(tmp_path / "hf"), str(tmp_path / "m")]) == 0
    weights = tmp_path / "m" / "release"
    with torch.serialization.safe_globals(SAFE_GLOBALS):
        args = torch.load(weights / "common.pt", weights_only=True)["args"]
    found, expected = config_from(args), config_for(tmp_path / "hf", ParallelLayout(1))
    for field in SAME + (SAME_OF_EXPERTS if expected.num_moe_experts else ()):
        assert getattr(found, field) == getattr(expected, field), field
    assert args.rotary_percent == {"phi3": 0.75, "glm4": 0.5}.get(name, 1.0)
    assert args.rotary_interleaved == expected.rotary_interleaved
    if expected.num_moe_experts:
        frequency = expected.moe_layer_freq
        assert found.moe_layer_freq == (1 if isinstance(frequency, list) and all(frequency) else frequency)
    backend = maybe_load_config(str(weights))
    assert backend is not None and backend.sharded_backend == "torch_dist"
    assert getattr(backend, "common_backend", "torch") == "torch"  # 0.19 supports only one
