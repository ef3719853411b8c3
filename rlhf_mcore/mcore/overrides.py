"""Apply a user's fields of Megatron's configuration classes (``actor.megatron``, ``actor.fp8``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_origin, get_type_hints

from megatron.core.transformer.enums import AttnBackend
from torch import nn

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import shorten
from rlhf_mcore.mcore.needs import problems
from rlhf_mcore.platform import DTYPES, Platform

T = TypeVar("T")

# Fields of TransformerConfig that ``fp8`` of a group stands for.
_FP8 = {"blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"}}


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values by field, and the key of the configuration that holds them."""

    key: str = "megatron"
    values: Mapping[str, Any] = field(default_factory=dict)
    fp8: str = ""  # the key that fields of 8 bits follow from, and its value

    @classmethod
    def of(cls, role: str, group: Any) -> Overrides:
        """Make those of a group of the configuration: its ``megatron``, and what its ``fp8`` stands for."""
        fp8 = getattr(group, "fp8", None)
        values = {**(group.megatron or {}), **(_FP8[fp8] if fp8 is not None else {})}
        return cls(f"{role}.megatron", values, "" if fp8 is None else f"{role}.fp8={fp8}")

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

    def check(self, platform: Platform) -> None:
        """Refuse what cannot work on this machine.

        Raises:
            ConfigError: a field asks for kernels that are not here.
        """
        if not self.values:
            return
        if found := list(problems(self, platform)):
            raise ConfigError.many(found)


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


@contextmanager
def copies_of_pass(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Let go of the weights of 8 bits that a pass has made, at the end of this block.

    Layers make them of their weights in the first microbatch of a pass, for all of it (``is_first_microbatch``), and would keep one
    or two bytes a parameter until the next: while weights are offloaded, and beside an engine.
    """
    yield
    for chunk in chunks:
        for module in chunk.modules():
            if (kept := getattr(module, "_fp8_workspaces", None)) is not None:
                kept.clear()
