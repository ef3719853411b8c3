"""An agent with a tool, written like an agent for any model with OpenAI's API. The policy is at ``base_url``.

configs/quickstart/agent.yaml trains it. If a turn contains ``<tool>calculator 47*86</tool>``, the agent answers with the product. The
policy must then write the product after ``####``.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

# One client for all episodes of the process: with_options shares its connections.
CLIENT = AsyncOpenAI(api_key="of no episode", max_retries=0, timeout=300)
CALL = re.compile(r"<tool>calculator (\d{1,9})\*(\d{1,9})</tool>")
MAX_TURNS = 4


async def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Run an episode. Returns its reward."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = list(task["messages"])
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        call = CALL.search(said)
        if call is None:
            return float(said.rpartition("####")[2].strip() == task["ground_truth"])
        messages.append({"role": "tool", "content": str(int(call[1]) * int(call[2]))})
    return 0.0
