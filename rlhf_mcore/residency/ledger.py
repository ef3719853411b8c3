"""Record the allocations of a device and the peak of each phase, and reject allocations that are out of order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
# kinds of parts of a trained model; gradients are freed, the others are copied
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER)
ENGINE_WEIGHTS, ENGINE_CACHE = "engine weights", "engine cache"
OUTSIDE = "between_phases"


class LedgerOrderError(RuntimeError):
    """Memory was allocated or freed against the plan. This is a bug of rlhf_mcore, not a user's mistake."""


class OutOfDeviceMemory(RuntimeError):
    """The device has too little memory for an allocation. The message compares the use with the plan."""


@dataclass(slots=True)
class Ledger:
    """Bytes of the parts that move to and from this rank's device, by name.

    The ledger excludes tensors that never move, and tensors within a pass. While an engine's cache is allocated,
    gradients and optimizer state must not be: one is freed before the other is allocated.
    """

    resident: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)  # by phase
    _phase: str = OUTSIDE

    @property
    def total(self) -> int:
        return sum(self.resident.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count allocations in this block for the phase ``name``."""
        before, self._phase = self._phase, name
        self._note()
        try:
            yield
        finally:
            self._phase = before

    def add(self, name: str, num_bytes: int) -> None:
        """Record an allocation.

        Raises:
            LedgerOrderError: ``name`` is already allocated, or a part that excludes it is on the device.
        """
        if name in self.resident:
            raise LedgerOrderError(f"{name} was allocated twice, the second time in phase {self._phase}")
        if beside := [other for other in self.resident if _exclude(name, other)]:
            raise LedgerOrderError(f"{name} was allocated in phase {self._phase} while {beside[0]} is on the device")
        self.resident[name] = num_bytes
        self._note()

    def remove(self, name: str) -> None:
        """Record that memory was freed.

        Raises:
            LedgerOrderError: ``name`` is not allocated.
        """
        if name not in self.resident:
            raise LedgerOrderError(f"{name} was freed in phase {self._phase} but is not on the device")
        del self.resident[name]

    def pop(self) -> dict[str, float]:
        """Return ``memory/<phase>_bytes``, the peak of each phase since the last call."""
        metrics = {f"memory/{phase}_bytes": float(peak) for phase, peak in self.peaks.items() if phase != OUTSIDE}
        self.peaks = {}
        return metrics

    def _note(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.total)


def _exclude(name: str, other: str) -> bool:
    """Return whether the two parts must never be on the device together."""
    pairs = ((name, other), (other, name))
    return any(first == ENGINE_CACHE and second.endswith((GRADIENTS, OPTIMIZER)) for first, second in pairs)
