"""Work of a step by phase, and rates per second: tokens, floating-point operations, and the share of the devices' peak.

For a row of n tokens, a forward pass counts 2 operations per token and weight. In every layer it counts 4 · heads · head size
for each pair of a token and a token that it attends to. Causal attention has n (n + 1) / 2 pairs, counted as computed and not
as a full square (Narayanan et al. 2021, arXiv 2104.04473, appendix). A layer with a window has the pairs within the window.
In a gated delta net, each token reads a head's state with its key, adds the product of key and value, and reads the state
with its query (Yang et al. 2024, arXiv 2412.06464, eq. 10). This is 6 · value heads · key size · value size per token,
for any n. In a state space, each token adds the product of its input and its projection, and reads the state (Dao and Gu 2024,
arXiv 2405.21060): 4 · heads · head size · state size. In an MoE model, only the experts of a token count. The output layer
counts only for tokens with logits. An update counts as three forward passes, including trained MTP layers. Recomputation is
not counted, so the share is the model FLOPs utilisation (MFU) of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any  # numpy or torch
FORWARD, UPDATE = 1, 3  # cost of a pass in forward passes
# Dense bf16 rates from data sheets, by a part of torch's device name. The first match counts.
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
    """Return the peak of a device by its name, or None for an unknown device, such as a CPU."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of a forward pass: per token in the layers, per pair of tokens in attention, and per token with logits.

    ``window_pair`` counts a pair in layers whose tokens attend to the last ``window`` tokens only, including themselves.
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
        """Return the attention operations of rows with ``lengths`` tokens, per row."""
        pairs = self.pair * lengths * (lengths + 1) / 2
        if not self.window:
            return pairs
        beginning = lengths.clip(max=self.window)  # tokens whose window is not yet full
        return pairs + self.window_pair * (beginning * (beginning + 1) / 2 + (lengths - beginning) * self.window)


NO_FLOPS = ModelFlops(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The rows of a model run: their tokens, and their sampled tokens.

    ``lengths`` are the row lengths. ``spared`` are the lengths of row prefixes that are not computed again.
    """

    tokens: float
    sampled: float
    lengths: NDArray[np.float64]
    spared: NDArray[np.float64]


def seconds_beside(timing: Mapping[str, float]) -> float:
    """Sum the times in ``timing/step_s`` that do not belong to the step: its evaluation, and the save of the previous step."""
    return timing.get("timing/evaluate_s", 0.0) + timing.get("timing/save_s", 0.0)


@dataclass(slots=True)
class Throughput:
    """Accumulates the work of phases until ``pop``. ``peak_tflops`` is the peak of one device; None: MFU is not reported."""

    num_devices: int
    peak_tflops: float | None = None
    _work: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, phase: str, tokens: float, flops: float) -> None:
        """Add the work of all ranks in a phase."""
        before = self._work.get(phase, (0.0, 0.0))
        self._work[phase] = (before[0] + tokens, before[1] + flops)

    def pop(self, timing: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of the step and of the phases in ``timing`` (seconds as ``timing/<phase>_s``), and reset the counts.

        ``throughput/<phase>_tokens_per_s`` and ``_tflops`` count all devices together. ``_mfu`` is the share of their peak.
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
    """Accumulates wall seconds by name until ``pop``: ``with timers("generate"): ...``.

    ``synchronize`` is called at both ends of a span. On a GPU pass torch.cuda.synchronize. Otherwise a span ends when its
    work is queued, and the next span includes the remaining time.
    """

    def __init__(
        self, synchronize: Callable[[], None] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._synchronize = synchronize or (lambda: None)
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``, even if the block raises. Spans with different names may nest."""
        self._synchronize()
        start = self._clock()
        try:
            yield
            self._synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def pop(self) -> dict[str, float]:
        """Return the seconds since the last pop as metrics, ``{"timing/<name>_s": seconds}``, and reset them."""
        metrics = {f"timing/{name}_s": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return metrics
