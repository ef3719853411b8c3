"""A rollout function in which the policy answers, reads its answer and corrects it.

The score rewards the second answer, and pays extra for a correction, as in SCoRe (arXiv 2409.12917, equation 4). Run it with
``rollout.function=examples/self_correction.py:rollout`` on rows with a number as ground truth.
"""

from __future__ import annotations

import re
from typing import Any

BONUS = 0.5
REQUEST = "Check your answer, and then write the corrected answer."


async def rollout(policy: Any, prompt: Any, ctx: Any) -> dict[str, Any]:
    """Sample an answer and its correction."""
    first = await policy.sample(prompt.tokens)
    request = ctx.tokenize_messages([{"role": "user", "content": REQUEST}], after=first)
    second = await policy.sample([*prompt.tokens, *first.tokens, *request])
    grades = [is_right(turn.text, prompt.answer) for turn in (first, second)]
    reward = grades[1] + BONUS * (grades[1] - grades[0])
    return {"reward": reward, "parts": {"first": grades[0], "second": grades[1]}}


def is_right(text: str, answer: Any) -> float:
    """Return 1.0 if the last number of a text is the answer, else 0.0."""
    numbers = re.findall(r"-?\d+", text)
    return float(bool(numbers) and numbers[-1] == str(answer))
