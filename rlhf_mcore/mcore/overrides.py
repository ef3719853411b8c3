"""Apply the user's fields of Megatron's configuration classes (``actor.megatron``, ``actor.fp8``)."""

from __future__ import annotations

import re
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
        if found := list(problems(self, platform)):
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
