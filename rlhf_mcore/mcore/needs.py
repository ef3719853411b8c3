"""Check that the machine supports the user's Megatron fields: kernels, and devices with FP8."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import FP8_TOKENS
from rlhf_mcore.expected_kernels import APEX
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform

if TYPE_CHECKING:
    from rlhf_mcore.mcore.overrides import Overrides

TE = "transformer_engine"
_PACKAGES = {TE: "Transformer Engine", APEX: "NVIDIA's apex with --cuda_ext", "deep_ep": "DeepEP", "": ""}
# Fields with CUDA kernels, and the module that provides them. "" means Megatron or torch. False, null and 0 need no
# kernel.
_KERNELS = {
    "gradient_accumulation_fusion": APEX,
    "apply_rope_fusion": TE,
    "fused_single_qkv_rope": TE,
    "persist_layer_norm": TE,
    "use_te_activation_func": TE,
    "use_te_rng_tracker": TE,
    "moe_permute_fusion": TE,
    "moe_router_fusion": TE,
    "moe_enable_deepep": "deep_ep",
    "moe_shared_expert_overlap": "",
    "cpu_offloading": TE,
    "fine_grained_activation_offloading": "",
    "fp8": TE,
    "fp4": TE,
    "use_kitchen": TE,
    "nccl_ub": "",
    "cp_comm_type": TE,
    "symmetric_ar_type": TE,
    "tp_comm_overlap": TE,
    "bias_dropout_fusion": "",
    "bias_activation_fusion": "",
    "batch_invariant_mode": "",
}


HOPPER, CUDA = 9, (12, 9)


def problems(overrides: Overrides, platform: Platform) -> Iterator[str]:
    """Yield a message for each field that cannot work on this machine."""
    values = overrides.values
    needed = {name: module for name, module in _KERNELS.items() if overrides.wants(name)}
    if values.get("moe_token_dispatcher_type") == "flex":
        needed["moe_token_dispatcher_type"] = "deep_ep"
    if values.get("attention_backend", "auto") != "auto":
        needed["attention_backend"] = TE
    for name, module in needed.items():
        is_key = name == "fp8" and overrides.fp8
        shown = overrides.fp8 if is_key else f"{overrides.key}.{name}={values[name]}"
        remove = "set it to null" if is_key else "remove it"
        if platform.name == "cpu":
            yield f"{shown} needs CUDA, but this run uses the CPU; {remove}"
        elif module and find_spec(module) is None:
            yield f"{shown} needs {_PACKAGES[module]}, which is not installed; {remove}, or install it"
        elif is_key:
            yield from _device_problems(shown)


def make_buffers(
    overrides: Overrides, platform: Platform, layout: ParallelLayout, tokens: int, hidden_size: int
) -> None:
    """Create the buffers for overlapped tensor-parallel communication (``tp_comm_overlap``), once per process.

    Raises:
        ConfigError: another model of this process uses buffers of another shape.
    """
    multiple = layout.token_multiple * (FP8_TOKENS if overrides.wants("fp8") else 1)
    rows = tokens // multiple * multiple // layout.cp
    backend = overrides.values.get("tp_comm_bootstrap_backend", "nccl")
    try:
        platform.overlap_tensor_parallel((rows, hidden_size), layout.tp, overrides.wants("fp8"), backend)
    except ValueError as error:
        raise ConfigError(f"{overrides.key}.tp_comm_overlap=True: {error}; remove it from one of the two") from error


def _device_problems(shown: str) -> Iterator[str]:
    """Yield why Transformer Engine cannot use 128x128 blocks with fp32 scales, which the engines use.

    On GPUs newer than Hopper it emulates such blocks with MXFP8, whose scales are powers of two.
    """
    major, minor = torch.cuda.get_device_capability()
    version = tuple(int(number) for number in (torch.version.cuda or "0").split(".")[:2])
    if major != HOPPER:
        instead = " and use actor.megatron={fp8: e4m3, fp8_recipe: mxfp8} on this GPU" if major > HOPPER else ""
        yield f"{shown} needs GPUs of compute capability 9.0 (H100, H200), found {major}.{minor}; set it to null{instead}"
    elif version < CUDA:
        yield f"{shown} needs torch with CUDA 12.9 or later, found {torch.version.cuda}; install that, or set it to null"
    elif not has_fp32_scales():
        yield (
            f"{shown} needs NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1, but Transformer Engine was imported without it; set it in the "
            "environment"
        )


def has_fp32_scales() -> bool:
    """Return whether Transformer Engine's block scales can be any fp32 value.

    Transformer Engine reads this from the environment when it is imported.
    """
    from transformer_engine.common.recipe import Float8BlockScaling

    return not Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale
