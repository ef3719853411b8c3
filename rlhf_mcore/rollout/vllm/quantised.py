"""Have vLLM hold weights of 8 bits, as it holds them of files with such weights: on CUDA, where it multiplies with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhf_mcore.families.quantised import QUANTISATIONS

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def config_of(name: str, tensors: Iterable[str]) -> dict[str, Any]:
    """Return ``quantization_config`` of a config.json: of DeepSeek-V3's format for fp8, of compressed-tensors for int8.

    ``tensors``: the model's. Activations are quantised as layers get them, by token, and in fp8 by 128 of its numbers.
    """
    kind = QUANTISATIONS[name]
    others = [
        tensor.removesuffix(".weight") for tensor in tensors if tensor.endswith(".weight") and not kind.applies(tensor)
    ]
    if name == "fp8":
        block = list(kind.block)
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
            "modules_to_not_convert": others,
        }
    scheme = {
        "targets": ["Linear"],
        "weights": {**_INT8, "strategy": "channel", "dynamic": False},
        "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": others,
    }


def options(name: str, tensors: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of vllm.LLM. On a CPU an engine has none: it gets the values of 8 bits in the model's dtype."""
    config = config_of(name, tensors)

    def override(hf_config: Any) -> Any:
        hf_config.quantization_config = config
        return hf_config

    return {"hf_overrides": override}
