"""Build results.json and comparison.json of ``rlhf-mcore evaluate``, and their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhf_mcore.trainer import statistics
from rlhf_mcore.trainer.statistics import Graded, prompt_values

COMPARED = ("accuracy", "reward")
METHODS = {
    "interval": f"{statistics.CONFIDENCE:.0%} over prompts: Wilson's of shares, of other means percentile bootstrap, "
    f"{statistics.RESAMPLES} resamples",
    "pass_at_k": "unbiased estimator of Chen et al. 2021 (arXiv 2107.03374)",
    "majority_at_k": "most frequent answer of k responses, ties in expectation, mean over disjoint runs of k",
}
COMPARISON_METHODS = {
    "interval": f"{statistics.CONFIDENCE:.0%} paired percentile bootstrap over prompts, {statistics.RESAMPLES} resamples",
    "sign_test_p": "exact two-sided sign test over the prompts that differ",
}


def results(checkpoint: str, settings: Mapping[str, Any], rows: Sequence[Graded], seed: int) -> dict[str, Any]:
    """Return the content of results.json. The content does not depend on the time or speed of the evaluation."""
    by_source = statistics.sources(rows)
    parts = {"all": rows} | (
        {f"source: {name}": of_source for name, of_source in by_source.items()} if len(by_source) > 1 else {}
    )
    return {
        "checkpoint": checkpoint,
        "settings": settings,
        "methods": METHODS,
        "results": {name: _part(part, seed) for name, part in parts.items()},
    }


def _part(rows: Sequence[Graded], seed: int) -> dict[str, Any]:
    return {
        "num_prompts": len({row.index for row in rows}),
        "num_responses": len(rows),
        **{name: asdict(estimate) for name, estimate in statistics.estimates(rows, seed).items()},
        **statistics.length_quantiles(rows),
    }


def comparison(
    names: tuple[str, str], baseline: Sequence[Graded], evaluated: Sequence[Graded], seed: int
) -> dict[str, Any]:
    """Return the content of comparison.json: (evaluated - baseline) over the shared prompts.

    ``names``: the names of the baseline and of the evaluated model.
    """
    before, after = _values(baseline), _values(evaluated)
    shared = [prompt_id for prompt_id in before if prompt_id in after]
    out: dict[str, Any] = {
        "baseline": names[0],
        "evaluated": names[1],
        "num_prompts": len(shared),
        "num_prompts_not_shared": len(before) + len(after) - 2 * len(shared),
        "methods": COMPARISON_METHODS,
    }
    for name in COMPARED if shared else ():
        pairs = [{prompt_id: values[prompt_id][name] for prompt_id in shared} for values in (before, after)]
        means = [statistics.mean(list(values.values())) for values in pairs]
        out[name] = {"baseline": means[0], "evaluated": means[1]} | asdict(statistics.compare(pairs[0], pairs[1], seed))
    return out


def _values(rows: Sequence[Graded]) -> dict[str, dict[str, float]]:
    return {group[0].prompt_id: prompt_values(group) for group in statistics.by_prompt(rows).values()}


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
INTERVAL = f"{statistics.CONFIDENCE:.0%} interval"


def results_table(content: Mapping[str, Any]) -> Table:
    """Return header and rows, with one row per figure over all prompts."""
    rows: list[tuple[str, ...]] = []
    for name, value in content["results"]["all"].items():
        label = name.replace("_at_", "@").replace("_", " ")
        is_estimate = isinstance(value, dict)
        rows.append((label, *(_estimate(value) if is_estimate else (f"{value:g}", ""))))
    return ("", "value", INTERVAL), rows


def sources_table(content: Mapping[str, Any]) -> Table:
    """Return header and rows, with one row per data source. There are no rows for a single data source."""
    rows: list[tuple[str, ...]] = [
        (
            name.removeprefix("source: "),
            str(part["num_prompts"]),
            *_estimate(part["accuracy"]),
            *_estimate(part["reward"]),
        )
        for name, part in content["results"].items()
        if name != "all"
    ]
    return ("data source", "prompts", "accuracy", INTERVAL, "reward", INTERVAL), rows


def comparison_table(content: Mapping[str, Any]) -> Table:
    """Return header and rows, with one column per compared figure. There are no rows if no prompt is shared."""
    figures = {name: content[name] for name in COMPARED if name in content}
    columns = [_compare(figure, content["baseline"], content["evaluated"]) for figure in figures.values()]
    rows = [(label, *(column[label] for column in columns)) for label in (columns[0] if columns else ())]
    return ("", *figures), rows


def _compare(figure: Mapping[str, Any], baseline: str, evaluated: str) -> dict[str, str]:
    value, interval = _estimate(figure["difference"], sign="+")
    return {
        baseline: f"{figure['baseline']:.4f}",
        evaluated if evaluated != baseline else f"{evaluated} (now)": f"{figure['evaluated']:.4f}",
        "difference": value,
        INTERVAL: interval,
        "prompts: better / worse / same": f"{figure['wins']} / {figure['losses']} / {figure['ties']}",
        "p of the sign test": f"{figure['sign_test_p']:.3g}",
    }


def _estimate(value: Mapping[str, float], sign: str = "") -> tuple[str, str]:
    shown = {name: f"{number:{sign}.4f}" for name, number in value.items()}
    return shown["value"], f"{shown['low']} to {shown['high']}"
