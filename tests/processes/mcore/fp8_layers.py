"""Check how Transformer Engine's layers of a model quantise, with its own Python code (transformer_engine_worker.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MATRIX = re.compile(r"decoder\.layers\.\d+\..*\.linear_(qkv|proj|fc1|fc2)")


def computed_otherwise(model: Any) -> Iterator[str]:
    """Return the names of layers that do not compute as ``actor.fp8: blockwise`` promises."""
    from megatron.core import fp8_utils
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    from rlhf_mcore.mcore.groups import use_groups
    from rlhf_mcore.mcore.kernels import live_kernels
    from rlhf_mcore.mcore.overrides import copies_of_pass

    config = model.config
    if (config.fp8, config.fp8_recipe, config.fp8_param, config.first_last_layers_bf16) != (
        "e4m3",
        "blockwise",
        False,
        False,
    ):
        yield "config"
    if live_kernels(model)["products"] != "Transformer Engine, e4m3 (blockwise)":
        yield "kernels"
    layers = [
        (name, module)
        for chunk in model.chunks
        for name, module in chunk.named_modules()
        if isinstance(module, TransformerEngineBaseModule)
    ]
    if not all(
        any(part in name for name, _ in layers) for part in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    ):
        yield "layers"
    with use_groups(model.groups, model.platform), fp8_utils.get_fp8_context(config, 0):
        for name, layer in layers:
            if MATRIX.search(name):
                yield from (f"{name}: {problem}" for problem in _quantisers_otherwise(layer))
    for _, layer in layers:
        layer._fp8_workspaces["weight"] = object()
    with copies_of_pass(model.chunks):
        pass
    yield from (f"{name}: a copy is kept" for name, layer in layers if layer._fp8_workspaces)


def _quantisers_otherwise(layer: Any) -> Iterator[str]:
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    layer.init_fp8_metadata(num_gemms=getattr(layer, "num_gemms", 1))
    weights = layer._get_weight_quantizers()
    for of_pass in ("scaling_fwd", "scaling_bwd"):
        for quantiser in layer.quantizers[of_pass]:
            if not isinstance(quantiser, Float8BlockQuantizer) or quantiser.dtype != DType.kFloat8E4M3:
                yield f"{of_pass}: {type(quantiser).__name__}"
            elif quantiser.block_len != 128 or quantiser.force_pow_2_scales or quantiser.amax_epsilon != 0:
                yield f"{of_pass}: {vars(quantiser)}"
            elif quantiser.block_scaling_dim != (2 if any(quantiser is one for one in weights) else 1):
                yield f"{of_pass}: blocks of {quantiser.block_scaling_dim} axes"
    if not weights:
        yield "no weights"
