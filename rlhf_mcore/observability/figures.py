"""The metrics in step lines and in the live display: labels, formats and column widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric as displayed.

    ``width`` is the width of its usual values, to align columns. If space is short, figures with the lowest ``worth`` are
    dropped first. ``meaning`` explains a label that is not self-explanatory.
    """

    label: str
    metric: str
    text: Callable[[float], str]
    width: int
    worth: int
    meaning: str = ""

    @property
    def column_width(self) -> int:
        """Number of characters that a column needs, with the label broken into words."""
        return max(self.width, *map(len, self.label.split()))


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


FIGURES = (
    Figure("reward", "reward/mean", "{:z.3f}".format, 5, worth=9),
    Figure("loss", "loss/sft", "{:.4f}".format, 6, worth=9),
    Figure("loss", "loss/reward_model", "{:.4f}".format, 6, worth=9),
    Figure("loss", "loss/dpo", "{:.4f}".format, 6, worth=9),
    Figure("pairs right", "reward_model/accuracy", "{:.3f}".format, 5, worth=6),
    Figure("pairs right", "preference/accuracy", "{:.3f}".format, 5, worth=6),
    Figure("margin", "preference/margin", "{:z.3f}".format, 6, worth=5),
    Figure("kl", "loss/kl", "{:.4f}".format, 6, worth=5),
    Figure("teacher kl", "teacher/kl", "{:z.3f}".format, 6, worth=8),
    Figure("divergence", "teacher/divergence", "{:.4f}".format, 6, worth=8),
    Figure("entropy", "actor/entropy", "{:.2f}".format, 4, worth=2),
    Figure("len", "rollout/response_length_mean", "{:.1f}".format, 5, 6, "mean tokens of a response"),
    Figure(
        "cut off",
        "rollout/truncated_fraction",
        percent,
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
    Figure("mfu", "throughput/mfu", percent, 4, worth=2),
    Figure("time", "timing/step_s", "{:.1f} s".format, 6, worth=7),
    Figure("accuracy", "evaluate/accuracy", "{:.3f}".format, 5, worth=8),
    Figure("held-out loss", "evaluate/loss", "{:.4f}".format, 6, worth=8),
)


def figure_text(figure: Figure, metrics: Mapping[str, Any]) -> str:
    """Format the metric's value; empty if the step does not report it."""
    value = metrics.get(figure.metric)
    if value is None:
        return ""
    number = float(value)
    return figure.text(number) if math.isfinite(number) else str(number)


def step_line(step: int, total_steps: int, metrics: Mapping[str, Any]) -> str:
    """Format one step as an aligned log line: ``step  12/40  reward 0.610  length   7.2  ...``."""
    words = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    for figure in FIGURES:
        text = figure_text(figure, metrics)
        if text:
            words.append(f"{figure.label} {text:>{figure.width}}")
    return "  ".join(words)


def explain_labels(metrics: Mapping[str, Any]) -> str:
    """Explain the labels of a step line that need it: ``len: mean tokens of a response; ...``. Empty if none does."""
    return "; ".join(
        f"{figure.label}: {figure.meaning}" for figure in FIGURES if figure.meaning and figure_text(figure, metrics)
    )
