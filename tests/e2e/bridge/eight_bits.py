"""Compare the values that a bridge writes to vLLM's 8-bit layers on a CPU with vLLM's loaders, quantisers and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlhf_mcore.bridge.map.engine import map_engine, reloading
from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter, trace
from rlhf_mcore.bridge.run.quantised import largest_magnitudes, quantise, scales_of
from rlhf_mcore.families.quantised import QUANTISATIONS, Quantisation
from rlhf_mcore.rollout.vllm.arguments import config_of
from tests.e2e.bridge import models
from tests.e2e.bridge.models import Case, build, vllm_config
from tests.e2e.processors import layers_of_8_bits, missing_instructions

KINDS = tuple(QUANTISATIONS.values())
HEADS, KV_HEADS, WIDTH, SIZE, EXPERTS = 8, 4, 64, 256, 4
CASE = Case("qwen3_moe", False, KV_HEADS, "bfloat16")
# Layouts of engines. Experts are whole with ep. Without it, they are split, with dp2 by both groups.
GRIDS: dict[str, dict[str, int]] = {
    "tp1": {"tp": 1},
    "tp2": {"tp": 2},
    "ep2": {"tp": 2, "ep": 2},
    "pp2": {"tp": 1, "pp": 2},
    "dp2_ep2": {"tp": 1, "dp": 2, "ep": 2},
    "dp2": {"tp": 1, "dp": 2},
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of a Qwen3-MoE whose matrices have whole blocks on each of two ranks."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (97, SIZE)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}{name}_layernorm.weight": (SIZE,) for name in ("input", "post_attention")}
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{prefix}self_attn.{name}_proj.weight"] = (heads * WIDTH, SIZE)
        found[f"{prefix}self_attn.o_proj.weight"] = (SIZE, HEADS * WIDTH)
        found |= {f"{prefix}self_attn.{name}_norm.weight": (WIDTH,) for name in "qk"}
        found[f"{prefix}mlp.gate.weight"] = (EXPERTS, SIZE)
        for expert in range(EXPERTS):
            for name in ("gate", "up", "down"):
                found[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] = (SIZE, SIZE)
    return found | {"model.norm.weight": (SIZE,), "lm_head.weight": (97, SIZE)}


def hf_config(kind: Quantisation | None) -> Any:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=97,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        moe_intermediate_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    if kind is not None:
        config.quantization_config = config_of(kind.name, shapes())
    return config


def quantise_weights(weights: Mapping[str, Tensor], kind: Quantisation) -> dict[str, Tensor]:
    """Return the values that a bridge sends."""
    sent: dict[str, Tensor] = {}
    for name, weight in weights.items():
        sent[name] = weight
        if kind.applies(name):
            largest = largest_magnitudes(weight, (0, 0), kind)
            sent[name] = torch.empty(weight.shape, dtype=getattr(torch, kind.dtype))
            sent[name + kind.suffix] = scales_of(largest, kind)
            quantise(weight, (0, 0), largest, kind, sent[name])
    return sent


def fill(parameter: EngineParameter, flat: Tensor, sent: Mapping[str, Tensor]) -> None:
    for piece in parameter.pieces:
        view(flat, piece).copy_(sent[piece.hf_name][piece.slices])
    for begin, end in parameter.padding:
        flat[begin:end] = 0


@torch.no_grad()
def check_8_bits(kind: Quantisation, directory: Path, grid: Mapping[str, int]) -> dict[str, Any]:
    """Return the names of differing tensors, and the errors of kernels against products with the 8-bit values, if supported."""
    generator = torch.Generator().manual_seed(5)
    weights = {name: (torch.randn(shape, generator=generator) / 8).bfloat16() for name, shape in shapes().items()}
    sent, seen = quantise_weights(weights, kind), dict[str, Any]()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(models, "hf_config", lambda case: hf_config(kind)))
        stack.enter_context(layers_of_8_bits())
        config = stack.enter_context(vllm_config(CASE, directory / kind.name, **grid))
        plain = build(config, is_processed=False)
        engine = trace(plain, kind.with_scales(shapes()), probe=False)
        written = {p.name: torch.zeros(p.shape, dtype=p.dtype) for p in engine.parameters if p.pieces}
        for parameter in engine.parameters:
            if parameter.pieces:
                fill(parameter, written[parameter.name].view(-1), sent)
        plain.load_weights(iter(sent.items()))
        live = dict(plain.named_parameters())
        seen["other than vLLM loads"] = [name for name, tensor in written.items() if not equal(tensor, live[name])]
        seen["8 bits"] = sorted(name for name, tensor in written.items() if tensor.itemsize == 1)
        seen["unused"], seen["bytes"] = engine.unused, sum(tensor.nbytes for tensor in written.values())
        if not missing_instructions(kind.name):
            seen["gaps"] = kernel_gaps(build(config, is_processed=True), kind, sent, written)
    with (
        mock.patch.object(models, "hf_config", lambda case: hf_config(None)),
        vllm_config(CASE, directory / f"{kind.name}-plain", **grid) as config,
    ):
        plain = build(config, is_processed=False)
        plain.load_weights(iter(weights.items()))
    cast = fused_by_vllm(dict(plain.named_parameters()), written) if kind.name == "fp8" else {}
    seen["other than vLLM's cast"] = [name for name, tensor in cast.items() if not equal(tensor, written[name])]
    theirs = whole_by_compressed_tensors(weights) if kind.name == "int8" else {}
    seen["other than compressed-tensors"] = [n for n, tensor in theirs.items() if not equal(tensor, sent[n])]
    return seen | {"compared": len(cast) + len(theirs)}


def equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.detach().view(torch.uint8))


def fused_by_vllm(plain: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the results of vLLM's online quantiser for the weights of a rank: fused, split, and for all experts."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    made: dict[str, Tensor] = {}
    for name, tensor in written.items():
        if tensor.itemsize == 1:
            matrices = plain[name].detach().reshape(-1, *tensor.shape[-2:])
            eight, scales = zip(*(per_block_cast_to_fp8(m, [128, 128], use_ue8m0=False) for m in matrices), strict=True)
            made[name] = torch.stack(eight).view(tensor.shape)
            made[f"{name}_scale_inv"] = torch.stack(scales).view(written[f"{name}_scale_inv"].shape)
    return made


def whole_by_compressed_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args, made = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel"), dict[str, Tensor]()
    for name, weight in weights.items():
        if QUANTISATIONS["int8"].applies(name):
            low, high = weight.float().aminmax(dim=1, keepdim=True)
            scale, zero = calculate_qparams(low, high, args)
            made[name] = quantize(weight.float(), scale, zero, args, dtype=torch.int8)
            made[name + "_scale"] = scale
    return made


def kernel_gaps(
    model: Any, kind: Quantisation, sent: Mapping[str, Tensor], written: Mapping[str, Tensor]
) -> dict[str, float]:
    """Write to a processed model through vLLM's reload, and compare its kernels with products with the 8-bit values."""
    synchronise(model, map_engine(model, shapes(), "loaders", quantisation=kind.name), sent)
    gaps = {}
    for name, module in model.named_modules():
        if (eight := written.get(f"{name}.weight")) is None or eight.itemsize > 1:
            continue
        scales = written[f"{name}.weight{kind.suffix}"].repeat_interleave(kind.block[0], 0)
        if kind.name == "fp8":
            scales = scales.repeat_interleave(128, 1)
        inputs = torch.randn(5, eight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        expected = inputs.float() @ (eight.float() * scales).t()
        found = module.quant_method.apply(module, inputs, None).float()
        gaps[name] = ((found - expected).norm() / expected.norm()).item()
    return gaps


def synchronise(model: Any, engine: EngineMap, sent: Mapping[str, Tensor]) -> None:
    views = engine.views(model)
    for parameter in engine.direct:
        fill(parameter, views[parameter.name], sent)
    for group in engine.repacked:
        with reloading(model, group) as opened:
            for parameter in group:
                fill(parameter, opened[parameter.name], sent)
