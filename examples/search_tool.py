"""A rollout function with a search tool. The policy may search before it answers; ``reward`` scores its last turn.

Run it with ``rollout.function=examples/search_tool.py:rollout`` on rows whose ``extra_info`` has a list of texts, ``documents``.
"""

from __future__ import annotations

import re
from typing import Any

MAX_SEARCHES = 3


async def rollout(policy: Any, prompt: Any, ctx: Any) -> None:
    """Sample turns until the policy answers. ``<search>words</search>`` in a turn is a search."""
    tokens = list(prompt.tokens)
    for _ in range(MAX_SEARCHES):
        turn = await policy.sample(tokens, stop="</search>")
        query = re.search(r"<search>(.*?)</search>", turn.text, re.DOTALL)
        if query is None:
            return
        found = await search(query[1], prompt.row["extra_info"].get("documents", []))
        tokens += turn.tokens + ctx.tokenize(f"\n<result>{found}</result>\n")
    await policy.sample(tokens)


async def search(query: str, documents: list[str]) -> str:
    """Return the document that shares most words with a query. Replace it by a request to your own service."""
    words = set(query.lower().split())
    return max(documents, key=lambda text: len(words & set(text.lower().split())), default="nothing found")
