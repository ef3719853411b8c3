"""Check and apply the user's fields of Megatron's configuration classes (``actor.megatron``, ``actor.fp8``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, TypeVar, get_origin, get_type_hints

import torch
from megatron.core.transformer.enums import AttnBackend
from torch import nn

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import FP8_TOKENS
from rlhf_mcore.expected_kernels import APEX
from rlhf_mcore.foreign import shorten
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import DTYPES, Platform

T = TypeVar("T")

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

# TransformerConfig fields for each value of a role's ``fp8``.
_FP8 = {"blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"}}


@dataclass(frozen=True, slots=True)
class Overrides:
    """Field values, and the config key that sets them."""

    key: str = "megatron"
    values: Mapping[str, Any] = field(default_factory=dict)
    fp8: str = ""  # the key and value that set the FP8 fields

    @classmethod
    def of(cls, role: str, group: Any) -> Overrides:
        """Build the overrides of a config group from its ``megatron`` and ``fp8``."""
        fp8 = getattr(group, "fp8", None)
        values = {**(group.megatron or {}), **(_FP8[fp8] if fp8 is not None else {})}
        return cls(f"{role}.megatron", values, "" if fp8 is None else f"{role}.fp8={fp8}")

    def build(self, kind: type[T], **ours: Any) -> T:
        """Build an instance of one of Megatron's classes from our fields and the user's fields of that class.

        Raises:
            ConfigError: Megatron rejects the user's values. The message names the fields that Megatron mentions, or
                all of them.
        """
        hints = get_type_hints(kind) if self.values else {}
        names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
        theirs = {name: value for name, value in self.values.items() if name in names}
        try:
            return kind(**{**ours, **{name: _to_typed(hints[name], value) for name, value in theirs.items()}})
        except Exception as error:  # Megatron's classes raise any type of error
            if not theirs:
                raise
            text = str(error)
            named = [name for name in theirs if re.search(rf"\b{re.escape(name)}\b", text)] or list(theirs)
            shown = ", ".join(dict.fromkeys(self._show(name) for name in named))
            reason = shorten(f"{type(error).__name__}: {text}", 300)
            raise ConfigError(f"{shown}: Megatron-core rejects it ({reason}); change or remove it") from error

    def _show(self, name: str) -> str:
        """Return the key that sets a field, and its value."""
        if self.fp8 and name in _FP8[self.fp8.rpartition("=")[2]]:
            return self.fp8
        return f"{self.key}.{name}={shorten(repr(self.values[name]), 100)}"

    def overlapping(self) -> Overrides:
        """Overlap gradient reduction and weight gathering with the passes, unless the user set these fields."""
        if "overlap_grad_reduce" in self.values and not self.wants("overlap_grad_reduce"):
            return self
        values = {"overlap_grad_reduce": True, "overlap_param_gather": True, **self.values}
        return replace(self, values=values)

    def wants(self, name: str) -> bool:
        return bool(self.values.get(name))

    @property
    def needs_one_shape(self) -> bool:
        """Return whether all passes must contain the same number of tokens."""
        return self.wants("tp_comm_overlap")

    def check(self, platform: Platform) -> None:
        """Reject fields that cannot work on this machine.

        Raises:
            ConfigError: a field needs kernels that are missing.
        """
        if not self.values:
            return
        if found := list(machine_problems(self, platform)):
            raise ConfigError.many(found)


def _to_typed(hint: Any, value: Any) -> Any:
    """Convert a plain value for Megatron: torch dtypes and enumerations by name, tuples from lists."""
    if isinstance(value, str) and value in DTYPES and "dtype" in str(hint):
        return DTYPES[value]
    if hint is AttnBackend:
        if value not in AttnBackend.__members__:
            raise ValueError(f"attention_backend must be one of: {', '.join(AttnBackend.__members__)}")
        return AttnBackend[value]
    if (isinstance(value, list) and "Tuple" in str(hint)) or get_origin(hint) is tuple:
        return tuple(value)
    return value


@contextmanager
def copies_of_pass(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Free the FP8 weights of a pass at the end of this block.

    Layers convert their weights in the first microbatch of a pass, for the whole pass (``is_first_microbatch``). They
    would keep one or two bytes per parameter until the next pass, even while weights are offloaded or an engine uses
    the device.
    """
    yield
    for chunk in chunks:
        for module in chunk.modules():
            if (kept := getattr(module, "_fp8_workspaces", None)) is not None:
                kept.clear()


# --------------------------------------------------------------------------------------------------- what fields need
def machine_problems(overrides: Overrides, platform: Platform) -> Iterator[str]:
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
