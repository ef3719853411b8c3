"""Which metrics a person watches, what they are called and how many digits are worth reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric as people read it.

    ``width`` is that of its usual values, so that lines stand in columns. Where there is no room for all, figures with
    the lowest ``worth`` go first. ``meaning`` explains a label that does not explain itself.
    """

    label: str
    metric: str
    text: Callable[[float], str]
    width: int
    worth: int
    meaning: str = ""

    @property
    def column_width(self) -> int:
        """Characters that a column needs, its label broken into words."""
        return max(self.width, *map(len, self.label.split()))


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


FIGURES = (
    Figure("reward", "reward/mean", "{:z.3f}".format, 5, worth=9),
    Figure("loss", "loss/sft", "{:.4f}".format, 6, worth=9),
    Figure("loss", "loss/reward_model", "{:.4f}".format, 6, worth=9),
    Figure("pairs right", "reward_model/accuracy", "{:.3f}".format, 5, worth=6),
    Figure("kl", "loss/kl", "{:.4f}".format, 6, worth=5),
    Figure("entropy", "actor/entropy", "{:.2f}".format, 4, worth=2),
    Figure("len", "rollout/response_length_mean", "{:.1f}".format, 5, 6, "mean tokens of a response"),
    Figure(
        "cut off",
        "rollout/truncated_fraction",
        _percent,
        4,
        1,
        "responses that reached rollout.sampling.max_new_tokens",
    ),
    Figure("grad norm", "actor/grad_norm", "{:.2f}".format, 5, worth=3),
    Figure("grad norm", "reward_model/grad_norm", "{:.2f}".format, 5, worth=3),
    Figure(
        "logprob diff", "rollout/logprob_diff_mean", "{:.0e}".format, 5, 4, "engine against trainer, mean of a token"
    ),
    Figure("stale mean", "rollout/staleness_mean", "{:.2f}".format, 4, worth=4),
    Figure("max", "rollout/staleness_max", "{:.0f}".format, 1, worth=4),
    Figure("mfu", "throughput/mfu", _percent, 4, worth=2),
    Figure("time", "timing/step_s", "{:.1f} s".format, 6, worth=7),
    Figure("accuracy", "evaluate/accuracy", "{:.3f}".format, 5, worth=8),
    Figure("held-out loss", "evaluate/loss", "{:.4f}".format, 6, worth=8),
)


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric whose course a person watches."""

    label: str
    metric: str
    text: Callable[[float], str]


CURVES = (
    Curve("reward", "reward/mean", "{:z.3f}".format),
    Curve("loss", "loss/sft", "{:.4f}".format),
    Curve("loss", "loss/reward_model", "{:.4f}".format),
    Curve("kl", "kl/mean", "{:.4f}".format),
    Curve("entropy", "actor/entropy", "{:.2f}".format),
    Curve("length", "rollout/response_length_mean", "{:.1f}".format),
)


def phase_shares(reported: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """The share of each phase in the time of steps, the largest first."""
    seconds: dict[str, float] = {}
    for metrics in reported:
        for name, value in metrics.items():
            phase = name.removeprefix("timing/").removesuffix("_s")
            if name == f"timing/{phase}_s" and phase not in ("step", "tokens_per"):
                seconds[phase] = seconds.get(phase, 0.0) + float(value)
    total = sum(seconds.values())
    shares = [(phase, value / total) for phase, value in seconds.items()] if total > 0 else []
    return sorted(shares, key=lambda share: -share[1])


def rates(metrics: Mapping[str, Any]) -> list[str]:
    """Speed and memory of a step, as far as it reports them."""
    found = []
    if (speed := metrics.get("timing/tokens_per_s")) is not None:
        found.append(f"{speed:,.0f} tokens/s")
    if (mfu := metrics.get("throughput/mfu")) is not None:
        found.append(f"mfu {_percent(mfu)}")
    for suffix in ("_allocated_bytes", "_bytes"):
        peaks = [value for name, value in metrics.items() if name.startswith("memory/") and name.endswith(suffix)]
        if peaks:
            return [*found, f"memory {max(peaks) / 2**30:.1f} GiB"]
    return found


def figures_that_fit(reported: Sequence[Mapping[str, Any]], width: int) -> list[Figure]:
    """The figures that any of ``reported`` has, in order, as many as columns of two spaces apart fit into ``width``."""
    figures = [figure for figure in FIGURES if any(figure_text(figure, metrics) for metrics in reported)]
    while sum(figure.column_width + 2 for figure in figures) > width:
        figures.remove(min(figures, key=lambda figure: figure.worth))
    return figures


def figure_text(figure: Figure, metrics: Mapping[str, Any]) -> str:
    """The metric's value as text, empty when the step did not report it."""
    value = metrics.get(figure.metric)
    if value is None:
        return ""
    number = float(value)
    return figure.text(number) if math.isfinite(number) else str(number)


def step_line(step: int, total_steps: int, metrics: Mapping[str, Any]) -> str:
    """One step on one line, for logs: ``step  12/40  reward 0.610  length   7.2  ...``. Lines stand in columns."""
    words = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for figure in FIGURES:
        text = figure_text(figure, metrics)
        if text:
            words.append(f"{figure.label} {text:>{figure.width}}")
    return "  ".join(words)


def explain_labels(metrics: Mapping[str, Any]) -> str:
    """Explain the labels of a step line that need it: ``len: mean tokens of a response; ...``. Empty where none does."""
    return "; ".join(
        f"{figure.label}: {figure.meaning}" for figure in FIGURES if figure.meaning and figure_text(figure, metrics)
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of at most ``width`` bars between their least and greatest; neighbours are averaged to fit.

    A constant is drawn at mid height, what is not finite as a blank.
    """
    num_bars = min(len(values), width)
    edges = [len(values) * bar // num_bars for bar in range(num_bars + 1)] if num_bars else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * len(means)
    least, spread = min(finite), max(finite) - min(finite)
    heights = [(mean - least) / spread if spread > 0 else 0.5 for mean in means]
    return "".join(BARS[min(int(h * len(BARS)), len(BARS) - 1)] if math.isfinite(h) else " " for h in heights)
