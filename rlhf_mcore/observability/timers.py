"""Wall time by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Adds up wall seconds by name until they are popped: ``with timers("generate"): ...``.

    ``synchronize`` is called at both ends of a span; on a GPU pass torch.cuda.synchronize, otherwise a span ends when
    its work has been queued, and the next span pays for it.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``, also when the block raises. Spans of different names may nest."""
        self._synchronize()
        start = self._clock()
        try:
            yield
            self._synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def pop(self) -> dict[str, float]:
        """Return the seconds since the last pop as metrics, ``{"timing/<name>_s": seconds}``; counts start again at zero."""
        metrics = {f"timing/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return metrics
