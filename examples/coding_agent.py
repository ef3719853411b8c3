"""An agent that repairs code. It edits a file in its container until a test there passes.

configs/quickstart/coding_agent.yaml trains it. A turn ``<edit>a*b</edit>`` replaces the body of the function in ``calc.py``, and the
policy then reads the last line of the failing test. The agent returns no reward. Hidden tests run at the end and give the reward.
"""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

# One client for all episodes of the process: with_options shares its connections.
CLIENT = AsyncOpenAI(api_key="of no episode", max_retries=0, timeout=300)
EDIT = re.compile(r"<edit>(.{1,80})</edit>")
MAX_TURNS = 3


async def play(task: dict[str, Any], base_url: str, api_key: str, container: Any) -> None:
    """Run an episode. The tests of its row then grade the files in the container."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = list(task["messages"])
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        edit = EDIT.search(said)
        if edit is None:
            return
        await container.write({"calc.py": f"def f(a, b): return {edit[1]}\n"})
        test = await container.run("python3 -S test_seen.py", timeout_s=10)
        if test.ok:
            return
        shown = (test.output.strip() or test.reason).splitlines()[-1]
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": shown[:40]}]
