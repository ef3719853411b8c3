"""LangChain at the endpoint of agents: its package, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.unit.environments.test_agents import endpoint, run, texts_of

__all__ = ["endpoint", "run"]  # fixtures
ORACLES = Path(sys.prefix, "oracles")  # installed by launch/setup.sh, like the published verl and TRL
CLIENT = """
import os, sys
sys.path.append(os.environ["ORACLES"])
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

model = ChatOpenAI(model="policy", max_retries=0, timeout=20)
messages = [HumanMessage("q")]
said = model.bind_tools([add]).invoke(messages)
[call] = said.tool_calls
messages += [said, add.invoke(call)]
assert isinstance(messages[-1], ToolMessage) and messages[-1].content == "3"
text = "".join(str(part.content) for part in model.bind_tools([add]).stream(messages))
assert text == "it is 3", text
print("done")
"""


@pytest.mark.ci  # LangChain takes two seconds to import
@pytest.mark.skipif(
    find_spec("langchain_openai") is None and not (ORACLES / "langchain_openai").is_dir(),
    reason="launch/setup.sh did not install langchain-openai",
)
def test_langchain_with_a_tool_is_one_sequence_of_sampled_tokens(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "ORACLES": str(ORACLES)}
        env = {**os.environ, **own, "LANGSMITH_TRACING": "false"}
        ended = subprocess.run([sys.executable, "-c", CLIENT], env=env, capture_output=True, text=True, timeout=60)
        assert ended.stdout == "done\n", ended.stderr
        return 1

    [whole] = run(['call:add:{"b":  2, "a": 1}', "it is 3"], play)
    assert whole.sequences == () and texts_of(whole, tokenizer) == ['call:add:{"b":  2, "a": 1}<end>', "it is 3<end>"]
    assert json.loads(json.dumps(whole.record)) == whole.record
