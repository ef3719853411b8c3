"""List the metrics that a person watches, their names and how many digits are worth reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


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
    """Write the metric's value as text, empty when the step did not report it."""
    value = metrics.get(figure.metric)
    if value is None:
        return ""
    number = float(value)
    return figure.text(number) if math.isfinite(number) else str(number)


def step_line(step: int, total_steps: int, metrics: Mapping[str, Any]) -> str:
    """Write one step on one line, for logs: ``step  12/40  reward 0.610  length   7.2  ...``. Lines stand in columns."""
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
