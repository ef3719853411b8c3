"""Metrics of the times of a step's episodes, over all ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

# Of an episode's record -> the metric of their mean.
TIMES = {
    "seconds": "timing/episode",
    "engine_s": "timing/episode_engine",
    "tools_s": "timing/episode_tools",
    "waiting_s": "timing/episode_waiting",
}
MAX_TOOLS = 32  # with metrics of their own: the policy may invent names
_OTHER = re.compile(r"[^\w.-]", re.ASCII)


def sums_of_episodes(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the times of a rank's episodes, as JSON values. ``records``: those of trajectories."""
    tools = defaultdict[str, list[float]](list)
    for record in records:
        for node in record["nodes"]:
            for call in node["calls"]:
                if call["ended_s"] is not None:
                    tools[_OTHER.sub("_", call["name"])[:64]].append(call["ended_s"] - call["begun_s"])
    return {
        "count": len(records),
        "turns": sum(len(record["nodes"]) for record in records),
        "first": min(record["unix_time"] for record in records),
        "last": max(record["unix_time"] + record["seconds"] for record in records),
        "times": {name: sum(record[name] for record in records) for name in TIMES},
        "tools": {name: (len(seconds), sum(seconds)) for name, seconds in tools.items()},
    }


def episode_metrics(ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Compute the metrics of a step from the sums of its ranks. No name ends as those of phases, which add up to a step."""
    count = sum(rank["count"] for rank in ranks)
    times = {name: sum(rank["times"][name] for rank in ranks) for name in TIMES}
    span = max(rank["last"] for rank in ranks) - min(rank["first"] for rank in ranks)
    metrics = {
        "rollout/turns_mean": sum(rank["turns"] for rank in ranks) / count,
        **{metric: times[name] / count for name, metric in TIMES.items()},
    }
    if span > 0:
        metrics["timing/concurrent_episodes"] = times["seconds"] / span
        in_tools = sum(spent for rank in ranks for _, spent in rank["tools"].values())
        metrics["timing/concurrent_calls"] = in_tools / span
    tools = defaultdict[str, list[float]](lambda: [0, 0.0])
    for rank in ranks:
        for name, (number, spent) in rank["tools"].items():
            tools[name][0] += number
            tools[name][1] += spent
    for name in sorted(tools, key=lambda name: (-tools[name][0], name))[:MAX_TOOLS]:
        number, spent = tools[name]
        metrics |= {f"rollout/tool_calls/{name}": float(number), f"timing/tool/{name}": spent / number}
    return metrics
