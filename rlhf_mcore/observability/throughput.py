"""Work of a step by phase, and what it comes to per second: tokens, floating-point operations, and the share of the devices' peak.

A forward pass of a row of n tokens counts, for each of them, 2 operations for every weight that it is multiplied with, and in every
layer 4 · heads · head size for each token that it attends to: n (n + 1) / 2 pairs (Narayanan et al. 2021, arXiv 2104.04473, appendix,
with causal attention counted as computed, not as a full square), in a layer with a window those within it. In a gated delta net each
token reads the state of a head with its key, adds a product of key and value to it, and reads it with its query (Yang et al. 2024,
arXiv 2412.06464, eq. 10): 6 · heads of values · key size · value size, whatever n is. Of a mixture only the experts count that a
token goes to, and the output layer only at tokens that have logits. An update is three forward passes, with those of MTP layers that
learn; what recomputation adds is not counted, so the share is the model FLOPs utilisation (MFU) of PaLM (Chowdhery et al. 2022, arXiv
2204.02311, appendix B).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any  # of numpy or of torch
FORWARD, UPDATE = 1, 3  # forward passes that a pass is worth
# Dense bf16 of the makers' data sheets, by a part of torch's name of the device. The first that fits counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "H20": 148.0,
    "H800": 989.0,
    "A100": 312.0,
}
PEAK_TFLOPS |= {"A800": 312.0, "L40S": 362.0, "MI300X": 1307.0}


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a device by its name; None of one that is not known, such as a CPU."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of a forward pass: of a token in the layers, of a pair of tokens in attention, of a token with logits.

    ``window_pair``: of a pair in those layers in which a token attends to the last ``window`` tokens, itself among them, alone.
    """

    token: float
    pair: float
    logits: float
    window_pair: float = 0.0
    window: int = 0

    def forward(self, rows: RowCounts, *, with_logits: bool = True) -> float:
        pairs = float(self.attention(rows.lengths).sum() - self.attention(rows.spared).sum())
        return self.token * rows.tokens + pairs + self.logits * rows.sampled * with_logits

    def attention(self, lengths: Array) -> Array:
        """Count the operations of all pairs in rows of so many tokens, by row."""
        pairs = self.pair * lengths * (lengths + 1) / 2
        if not self.window:
            return pairs
        beginning = lengths.clip(max=self.window)  # tokens whose window is not full yet
        return pairs + self.window_pair * (beginning * (beginning + 1) / 2 + (lengths - beginning) * self.window)


NO_FLOPS = ModelFlops(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows that a model runs over: their tokens, and those that were sampled.

    ``lengths``: of the rows. ``spared``: of the beginnings of rows that are not computed again.
    """

    tokens: float
    sampled: float
    lengths: NDArray[np.float64]
    spared: NDArray[np.float64]


def seconds_beside(timing: Mapping[str, float]) -> float:
    """Add up what is in ``timing/step_s`` and no part of making the step: its evaluation, and the save of the step before."""
    return timing.get("timing/evaluate_s", 0.0) + timing.get("timing/save_s", 0.0)


@dataclass(slots=True)
class Throughput:
    """Adds up the work of phases until it is popped. ``peak_tflops`` of one device; None: there is no MFU."""

    num_devices: int
    peak_tflops: float | None = None
    _work: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, phase: str, tokens: float, flops: float) -> None:
        """Add what all ranks together did in a phase."""
        before = self._work.get(phase, (0.0, 0.0))
        self._work[phase] = (before[0] + tokens, before[1] + flops)

    def pop(self, timing: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the phases in ``timing``, seconds as ``timing/<phase>_s``, and of the step; counts start at zero again.

        ``throughput/<phase>_tokens_per_s`` and ``_tflops`` are of all devices together, ``_mfu`` is the share of their peak.
        """
        work, self._work = self._work, {}
        rates: dict[str, float] = {}
        for phase, (tokens, flops) in work.items():
            seconds = timing.get(f"timing/{phase}_s", 0.0)
            if seconds > 0:
                rates |= {f"throughput/{phase}_tokens_per_s": tokens / seconds} | self._rates(
                    f"{phase}_", flops, seconds
                )
        if work and (seconds := timing["timing/step_s"] - seconds_beside(timing)) > 0:
            rates |= self._rates("", sum(flops for _, flops in work.values()), seconds)
        return rates

    def _rates(self, prefix: str, flops: float, seconds: float) -> dict[str, float]:
        rate = flops / seconds / 1e12
        rates = {f"throughput/{prefix}tflops": rate}
        if self.peak_tflops:
            rates[f"throughput/{prefix}mfu"] = rate / (self.num_devices * self.peak_tflops)
        return rates


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
