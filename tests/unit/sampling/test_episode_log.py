"""The times of an episode: by hand, as metrics, and as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.observability.run_directory import episode_files, write_rollouts
from rlhf_mcore.sampling.episode_log import CallTimes, EpisodeLog, TurnTimes, split_time
from rlhf_mcore.trainer.metrics import episode_metrics, sums_of_episodes


@pytest.mark.parametrize(
    ("drawing", "calling", "engine", "tools"),
    [
        ([], [], 0, 0),
        ([(0, 2)], [(2, 5)], 2, 3),
        ([(0, 2), (1, 3)], [], 3, 0),  # two turns at a time
        ([(0, 2), (6, 7)], [(2, 5), (1, 6)], 3, 4),  # a tool's time counts only while no turn is sampled
    ],
)
def test_an_instant_counts_for_the_engine_first_and_then_for_tools(
    drawing: Any, calling: Any, engine: float, tools: float
) -> None:
    assert split_time(drawing, calling) == (engine, tools)


def node(**more: Any) -> dict[str, Any]:
    own = {"parent": None, "context": "q", "said": "a", "num_context": 5, "num_tokens": 2, "num_cached": 4}
    own |= {"policy_version": 3, "finish_reason": "stop", "asked_s": 0.5, "begun_s": 1.0, "ended_s": 2.0, "calls": []}
    return {**own, **more}


def episode(began: float, seconds: float, *nodes: dict[str, Any], **parts: float) -> dict[str, Any]:
    return {
        "unix_time": began,
        "seconds": seconds,
        "engine_s": 1.0,
        "tools_s": 0.5,
        "waiting_s": 0.25,
        "nodes": list(nodes),
    } | parts


def call(name: str, begun: float, ended: float | None) -> dict[str, Any]:
    return {"name": name, "arguments": '{"a": 1}', "begun_s": begun, "ended_s": ended}


def test_metrics_over_ranks() -> None:
    first = [episode(10.0, 4.0, node(calls=[call("add", 2, 3), call("add", 2, None), call("x y/..", 1, 2)]), node())]
    second = [episode(11.0, 2.0, node(calls=[call("add", 2, 5)])), episode(12.0, 3.0, node(), engine_s=4.0)]
    ranks = json.loads(json.dumps([sums_of_episodes(first), sums_of_episodes(second)]))  # as ranks exchange them
    assert episode_metrics(ranks) == {
        "rollout/turns_mean": 4 / 3,
        "timing/episode": 3.0,
        "timing/episode_engine": 2.0,
        "timing/episode_tools": 0.5,
        "timing/episode_waiting": 0.25,
        "timing/concurrent_episodes": 9 / 5,
        "timing/concurrent_calls": 5 / 5,  # calls of 1, 1 and 3 seconds
        "rollout/tool_calls/add": 2.0,
        "timing/tool/add": 2.0,
        "rollout/tool_calls/x_y_..": 1.0,
        "timing/tool/x_y_..": 1.0,
    }


def test_a_policy_that_invents_names_of_tools_makes_no_more_metrics_than_32() -> None:
    calls = [call(f"tool{number}", 0, 1) for number in range(500)] + [call("often", 0, 1)] * 2
    metrics = episode_metrics([sums_of_episodes([episode(0.0, 1.0, node(calls=calls))])])
    assert len([name for name in metrics if name.startswith("timing/tool/")]) == 32 and "timing/tool/often" in metrics


def test_calls_have_their_results_once_and_unknown_ones_do_not_matter() -> None:
    log = EpisodeLog()
    log.turns[7] = TurnTimes(0.0, 1.0, 2.0)
    log.add_node(0, 7, [{"id": "c", "function": {"name": "add", "arguments": "{}"}}])
    log.calls["d"] = CallTimes(0, "sub", "", 1.0)
    log.answer_calls(["c", "other"], at=log.began + 50.0)
    log.answer_calls(["c"], at=log.began + 90.0)
    record = log.node_record(0)
    assert [(each["name"], each["ended_s"]) for each in record["calls"]] == [("add", 50.0), ("sub", None)]
    assert (record["asked_s"], record["begun_s"], record["ended_s"]) == (0.0, 1.0, 2.0)


RECORD = {"step": 2, "prompt_id": "../p", "sample": 1, "score": 0.5, "failure": None, "finish_reason": "stop"}


def test_episodes_are_a_file_beside_the_rollouts(tmp_path: Path) -> None:
    nodes = node(calls=[call("add", 2.0, 3.5)]), node(parent=0, num_context=3, num_cached=None)
    records = [{**RECORD, "episode": episode(100.0, 4.0, *nodes)}, {**RECORD, "sample": 2, "episode": None}]
    path = tmp_path / "step-000002.jsonl"
    episode_files(0)(path, records)
    write_rollouts(path, records)
    assert all("episode" not in each for each in map(json.loads, path.read_text().splitlines()))
    [line] = [json.loads(line) for line in (tmp_path / "episodes-000002.jsonl").read_text().splitlines()]
    assert (line["prompt_id"], line["sample"], len(line["nodes"])) == ("../p", 1, 2)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["episodes-000002.jsonl", path.name]
