"""Write the trace of an episode as OpenTelemetry JSON.

The JSON is an ExportTraceServiceRequest (OTLP 1), which a collector accepts:
https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding. Spans and attributes use the names of the semantic conventions for
generative AI if these define a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

_INTERNAL, _CLIENT = 1, 3  # SpanKind
_OK, _ERROR = 1, 2  # StatusCode
SCOPE = "rlhf_mcore.episodes"


def trace_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Build the trace of an episode: a span for the episode, for each turn, and for each tool call.

    ``record``: a recorded rollout with the field ``episode``.
    """
    episode = record["episode"]
    name = f"{record['step']} {record['prompt_id']} {record['sample']} {episode['unix_time']}"
    trace_id = hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=16).hexdigest()

    def span(number: str, parent: str | None, title: str, begun: float, ended: float, **more: Any) -> dict[str, Any]:
        times = [str(int((episode["unix_time"] + seconds) * 1e9)) for seconds in (begun, ended)]
        own = {
            "traceId": trace_id,
            "spanId": _span_id(trace_id, number),
            "name": title,
            "kind": more.pop("kind", _INTERNAL),
        }
        if parent is not None:
            own["parentSpanId"] = _span_id(trace_id, parent)
        own |= {"startTimeUnixNano": times[0], "endTimeUnixNano": times[1]}
        return own | {"attributes": _attributes(more.pop("attributes")), "status": more}

    whole = {
        "gen_ai.operation.name": "invoke_agent",
        "rlhf_mcore.step": record["step"],
        "rlhf_mcore.prompt_id": record["prompt_id"],
        "rlhf_mcore.sample": record["sample"],
        "rlhf_mcore.reward": record["score"],
        "rlhf_mcore.finish_reason": record["finish_reason"],
        **{f"rlhf_mcore.{part}_s": episode[f"{part}_s"] for part in ("engine", "tools", "waiting")},
    }
    status = {"code": _ERROR, "message": record["failure"]} if record["failure"] else {"code": _OK}
    spans = [span("episode", None, "episode", 0.0, episode["seconds"], attributes=whole, **status)]
    read: list[int] = []  # for each node, the number of tokens up to its end
    for place, node in enumerate(episode["nodes"]):
        before = (read[node["parent"]] if node["parent"] is not None else 0) + node["num_context"]
        read.append(before + node["num_tokens"])
        ended = node["ended_s"] if node["ended_s"] is not None else episode["seconds"]
        turn = _of_turn(node, before)
        spans.append(
            span(
                f"turn {place}",
                "episode",
                "chat policy",
                node["asked_s"],
                ended,
                kind=_CLIENT,
                attributes=turn,
                code=_OK,
            )
        )
        for number, call in enumerate(node["calls"]):
            if call["ended_s"] is None:
                continue
            own = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call["name"]}
            own |= {"gen_ai.tool.call.arguments": call["arguments"], "rlhf_mcore.node": place}
            title = f"execute_tool {call['name']}"
            key = f"call {place} {number}"
            spans.append(span(key, "episode", title, call["begun_s"], call["ended_s"], attributes=own, code=_OK))
    resource = {"attributes": _attributes({"service.name": "rlhf_mcore"})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": SCOPE}, "spans": spans}]}]}


def _of_turn(node: Mapping[str, Any], num_before: int) -> dict[str, Any]:
    cached = {} if node["num_cached"] is None else {"gen_ai.usage.cache_read.input_tokens": node["num_cached"]}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy",
        "gen_ai.usage.input_tokens": num_before,
        "gen_ai.usage.output_tokens": node["num_tokens"],
        **cached,
        "gen_ai.response.finish_reasons": [node["finish_reason"]],
        "rlhf_mcore.parent": -1 if node["parent"] is None else node["parent"],
        "rlhf_mcore.policy_version": node["policy_version"],
        "rlhf_mcore.queued_s": node["begun_s"] - node["asked_s"],
        "rlhf_mcore.context": node["context"],
        "rlhf_mcore.said": node["said"],
    }


def _span_id(trace_id: str, name: str) -> str:
    return hashlib.blake2b(f"{trace_id} {name}".encode(), digest_size=8).hexdigest()


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
