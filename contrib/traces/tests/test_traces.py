"""Traces of episodes in the format of OpenTelemetry collectors."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_mcore.observability.run_directory import episode_files
from tests.unit.sampling.test_episode_log import RECORD, call, episode, node


def test_traces_are_files_beside_the_episodes(tmp_path: Path) -> None:
    nodes = node(calls=[call("add", 2.0, 3.5)]), node(parent=0, num_context=3, num_cached=None)
    records = [{**RECORD, "episode": episode(100.0, 4.0, *nodes)}, {**RECORD, "sample": 2, "episode": None}]
    episode_files(8)(tmp_path / "step-000002.jsonl", records)
    assert [found.name for found in (tmp_path / "traces-000002").iterdir()] == ["0000.json"]
    trace = json.loads((tmp_path / "traces-000002" / "0000.json").read_text())
    [scope] = trace["resourceSpans"][0]["scopeSpans"]
    whole, first, tool, second = scope["spans"]
    assert [span["name"] for span in scope["spans"]] == ["episode", "chat policy", "execute_tool add", "chat policy"]
    assert {len(span["traceId"]) for span in scope["spans"]} == {32} and {
        len(span["spanId"]) for span in scope["spans"]
    } == {16}
    assert len({span["spanId"] for span in scope["spans"]}) == 4 and "parentSpanId" not in whole
    assert {span["parentSpanId"] for span in (first, tool, second)} == {whole["spanId"]}
    assert (whole["startTimeUnixNano"], whole["endTimeUnixNano"]) == ("100000000000", "104000000000")
    assert (tool["startTimeUnixNano"], tool["endTimeUnixNano"]) == ("102000000000", "103500000000")
    attributes = {each["key"]: each["value"] for each in second["attributes"]}
    assert attributes["gen_ai.usage.input_tokens"] == {
        "intValue": "10"
    }  # 5 and 2 tokens of the previous turn, 3 since then
    assert attributes["gen_ai.response.finish_reasons"] == {"arrayValue": {"values": [{"stringValue": "stop"}]}}
    assert {"key": "rlhf_mcore.reward", "value": {"doubleValue": 0.5}} in whole["attributes"] and whole["status"] == {
        "code": 1
    }
