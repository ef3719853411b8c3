"""Apply a user's fields of Megatron's configuration classes (``actor.megatron``), and check their needs of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, TypeVar, get_origin, get_type_hints

from megatron.core.transformer.enums import AttnBackend

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.expected_kernels import APEX
from rlhf_mcore.foreign import shorten
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import DTYPES, Platform

T = TypeVar("T")

TE = "transformer_engine"
_PACKAGES = {TE: "Transformer Engine", APEX: "NVIDIA's apex with --cuda_ext", "deep_ep": "DeepEP", "": ""}
# Fields whose kernels are CUDA's: the module they are in, "" for Megatron or torch itself. False, null and 0 ask for nothing.
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
    "overlap_moe_expert_parallel_comm": "",
    "delay_wgrad_compute": TE,
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


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values by field, and the key of the configuration that holds them."""

    key: str = "megatron"
    values: Mapping[str, Any] = field(default_factory=dict)

    def build(self, kind: type[T], **ours: Any) -> T:
        """Build an instance of one of Megatron's classes: our fields, then those of the user that it has.

        Raises:
            ConfigError: Megatron refuses the user's.
        """
        hints = get_type_hints(kind) if self.values else {}
        names = {item.name for item in fields(kind)}  # type: ignore[arg-type]
        theirs = {name: _to_typed(hints[name], value) for name, value in self.values.items() if name in names}
        try:
            return kind(**{**ours, **theirs})
        except Exception as error:  # its classes raise what they like
            if not theirs:
                raise
            reason = shorten(f"{type(error).__name__}: {error}", 300)
            shown = f"{self.key}={shorten(repr(dict(self.values)), 300)}"
            raise ConfigError(f"{shown}: Megatron-core refuses it ({reason}); change or remove these fields") from error

    def overlapping(self) -> Overrides:
        """Let gradients be reduced and weights be gathered beside the passes, unless the user has said otherwise."""
        if "overlap_grad_reduce" in self.values and not self.wants("overlap_grad_reduce"):
            return self
        values = {"overlap_grad_reduce": True, "overlap_param_gather": True, **self.values}
        return replace(self, values=values)

    def wants(self, name: str) -> bool:
        return bool(self.values.get(name))

    @property
    def needs_one_shape(self) -> bool:
        """Tell whether all passes must be over equally many tokens."""
        return self.wants("tp_comm_overlap")

    def make_buffers(self, platform: Platform, layout: ParallelLayout, tokens: int, hidden_size: int) -> None:
        """Make those through which tensor-parallel ranks exchange rows while they compute, once a process.

        Raises:
            ConfigError: another model of this process has ones of another shape.
        """
        rows = tokens // layout.token_multiple * layout.token_multiple // layout.cp
        backend = self.values.get("tp_comm_bootstrap_backend", "nccl")
        try:
            platform.overlap_tensor_parallel((rows, hidden_size), layout.tp, self.wants("fp8"), backend)
        except ValueError as error:
            raise ConfigError(f"{self.key}.tp_comm_overlap=True: {error}; remove it from one of the two") from error

    def check(self, platform: Platform) -> None:
        """Refuse what cannot work on this machine.

        Raises:
            ConfigError: a field asks for kernels that are not here.
        """
        if problems := list(self._problems(platform)):
            raise ConfigError.many(problems)

    def _problems(self, platform: Platform) -> Iterator[str]:
        needed = {name: module for name, module in _KERNELS.items() if self.wants(name)}
        if self.values.get("moe_token_dispatcher_type") == "flex":
            needed["moe_token_dispatcher_type"] = "deep_ep"
        if self.values.get("attention_backend", "auto") != "auto":
            needed["attention_backend"] = TE
        for name, module in needed.items():
            shown = f"{self.key}.{name}={self.values[name]}"
            if platform.name == "cpu":
                yield f"{shown} needs CUDA, and this run is on the CPU; remove it"
            elif module and find_spec(module) is None:
                yield f"{shown} needs {_PACKAGES[module]}, which is not installed; remove it, or install that"


def _to_typed(hint: Any, value: Any) -> Any:
    """Convert a plain value for Megatron: types of torch and enumerations by name, tuples written as lists."""
    if value in DTYPES and "dtype" in str(hint):
        return DTYPES[value]
    if hint is AttnBackend:
        try:
            return AttnBackend[value]
        except KeyError as error:
            names = ", ".join(backend.name for backend in AttnBackend)
            raise ConfigError(f"attention_backend={value!r} is not a choice; choose one of: {names}") from error
    if (isinstance(value, list) and "Tuple" in str(hint)) or get_origin(hint) is tuple:
        return tuple(value)
    return value
