"""The ledger of a device: what is on it, the most at a time in every phase, and that nothing comes or goes out of order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER)  # of a trained model's parts; gradients are freed, the others copied
ENGINE_WEIGHTS, ENGINE_CACHE = "engine weights", "engine cache"
OUTSIDE = "between_phases"


class OutOfOrder(RuntimeError):
    """Memory was asked for, or given back, against the plan. It is a mistake of this program, not of its user."""


@dataclass(slots=True)
class Ledger:
    """Bytes by name of what moves to this rank's device and leaves it.

    What never moves is not in it, nor what a pass needs for itself. While an engine's cache is allocated, nothing that only an update
    needs may be: the one leaves before the other comes.
    """

    resident: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)  # by phase
    _phase: str = OUTSIDE

    @property
    def total(self) -> int:
        return sum(self.resident.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is allocated in the block counts for the phase ``name``."""
        before, self._phase = self._phase, name
        self._note()
        try:
            yield
        finally:
            self._phase = before

    def add(self, name: str, num_bytes: int) -> None:
        """It has been allocated.

        Raises:
            OutOfOrder: it is there already, or it must not be there beside something else that is.
        """
        if name in self.resident:
            raise OutOfOrder(f"{name} was allocated twice, the second time in phase {self._phase}")
        if beside := [other for other in self.resident if _exclude(name, other)]:
            raise OutOfOrder(f"{name} was allocated in phase {self._phase} while {beside[0]} is on the device")
        self.resident[name] = num_bytes
        self._note()

    def remove(self, name: str) -> None:
        """It has been freed.

        Raises:
            OutOfOrder: it is not there.
        """
        if name not in self.resident:
            raise OutOfOrder(f"{name} was freed in phase {self._phase} and is not on the device")
        del self.resident[name]

    def pop(self) -> dict[str, float]:
        """``memory/<phase>_bytes``, the most at a time in each phase since the last call."""
        metrics = {f"memory/{phase}_bytes": float(peak) for phase, peak in self.peaks.items() if phase != OUTSIDE}
        self.peaks = {}
        return metrics

    def _note(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.total)


def _exclude(name: str, other: str) -> bool:
    """Whether the two are never on the device together."""
    return any(
        mine == ENGINE_CACHE and its.endswith((GRADIENTS, OPTIMIZER)) for mine, its in ((name, other), (other, name))
    )
