"""The ``prepare-data`` recipe ``open_assistant``: message trees with ranked answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlhf_mcore.commands.prepare_data.recipes import Message, PlacedRow, PreparedExample, RowError, read_message


def open_assistant(rows: Iterable[PlacedRow]) -> Iterator[PreparedExample | RowError]:
    """Convert OpenAssistant (Köpf et al. 2023, arXiv 2304.07327).

    A row is a tree of messages, or one message with parent_id. Every user turn with answers becomes an example. Its response is the
    best-ranked answer. If at least two answers are ranked, the worst-ranked answer is the rejected response. Deleted messages are
    skipped together with their replies.
    """
    flat: dict[str, tuple[str, dict[str, Any]]] = {}
    for place, row in rows:
        if isinstance(row.get("prompt"), Mapping):
            yield from _tree(place, row["prompt"], [])
        elif isinstance(row.get("message_id"), str):
            flat[row["message_id"]] = (place, {**row, "replies": []})
        else:
            yield RowError(f"{place}: neither a message tree nor a message with message_id")
    roots = []
    for place, row in flat.values():
        parent = flat.get(row.get("parent_id") or "")
        if parent is not None:
            parent[1]["replies"].append(row)
        elif row.get("parent_id") is None:
            roots.append((place, row))
    for place, row in roots:
        yield from _tree(place, row, [])


def _tree(place: str, node: Mapping[str, Any], before: list[Message]) -> Iterator[PreparedExample | RowError]:
    if node.get("deleted"):
        return
    try:
        here = [*before, read_message({"role": node.get("role"), "content": node.get("text")})]
    except RowError as error:
        yield RowError(f"{place}: {error}")
        return
    replies = [reply for reply in node.get("replies") or () if not reply.get("deleted") and reply.get("text")]
    if here[-1]["role"] == "user":
        yield _turn(place, node, here, replies)
    for reply in replies:
        yield from _tree(place, reply, here)


def _turn(
    place: str, node: Mapping[str, Any], prompt: list[Message], replies: list[Mapping[str, Any]]
) -> PreparedExample:
    ranked = sorted((reply for reply in replies if isinstance(reply.get("rank"), int | float)), key=lambda r: r["rank"])
    best = ranked or replies
    example = PreparedExample(place, "open_assistant", prompt, extra={"lang": str(node.get("lang") or "")})
    if best:
        example.response = best[0]["text"].strip()
    if len(ranked) > 1 and ranked[0]["rank"] < ranked[-1]["rank"]:
        example.chosen, example.rejected = ranked[0]["text"].strip(), ranked[-1]["text"].strip()
    return example
