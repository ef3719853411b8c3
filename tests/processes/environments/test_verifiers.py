"""The adapter of verifiers, on the real package, in worker processes. It has a folder of its own: RLHF_MCORE_TEST_VERIFIERS names it.

python -m pip install --target FOLDER verifiers==0.4.0
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.sessions import Answer, Sessions
from rlhf_mcore.rewards.items import WorkerLimits
from tests.commands import ROOT, finished

PACKAGES = os.environ.get("RLHF_MCORE_TEST_VERIFIERS", "")
TASKSETS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class GuessTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    pass

class GuessConfig(vf.TasksetConfig):
    tasks: int = 3

class Guess(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for number in range(self.config.tasks):
            data = Data(prompt=f"Guess number {number}.", system_prompt="Be brief.", answer=str(number))
            yield GuessTask(data, self.config.task)

class EnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class GuessEnv(vf.Env[EnvConfig]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as chat:
            segment = await chat.turn()
            while not segment.terminated and not won:
                guess = int(segment.last_reply)
                won = float(str(guess) == task.data.answer)
                if not won:
                    segment = await chat.turn("higher" if guess < int(task.data.answer) else "lower")
        chat.trace.record_reward("won", won, 1.0)

__all__ = ["Guess", "GuessEnv"]
"""
TOOLS = """
import verifiers.v1 as vf

class Sums(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        "Add two numbers."
        return str(a + b)

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Sums(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "5")

class Add(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="What is 2 + 3?"), self.config.task)

__all__ = ["Add"]
if __name__ == "__main__":
    Sums.run()
"""
FORGETFUL = """
import aiohttp, json
import verifiers.v1 as vf

class Task(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]): ...

class Once(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        yield Task(vf.TaskData(prompt="first"), self.config.task)

class Forgetful(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as web:
            for said in ("first", "a summary of it"):
                body = {"model": ctx.model, "messages": [{"role": "user", "content": said}]}
                await web.post(f"{endpoint}/chat/completions", json=body)
        return vf.ProgramResult(0, "", "")

__all__ = ["Once", "Forgetful"]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a run would be started."""
    if not PACKAGES:
        pytest.skip(
            "verifiers has no folder here: pip install --target FOLDER verifiers==0.4.0; RLHF_MCORE_TEST_VERIFIERS=FOLDER"
        )
    monkeypatch.chdir(tmp_path)
    Path("guess_v1.py").write_text(TASKSETS)
    Path("add_v1.py").write_text(TOOLS)
    Path("once_v1.py").write_text(FORGETFUL)
    yield tmp_path


class Played:
    """Sessions of a taskset in one process, a call at a time."""

    def __init__(self, taskset: str, **env: Any) -> None:
        options = {"packages": PACKAGES, "taskset": {"id": taskset}, "env": env}
        self.sessions = Sessions("verifiers", options, WorkerLimits(workers=1, timeout_s=120))

    def answer(self) -> dict[int, Answer]:
        """To everything that was called."""
        found: dict[int, Answer] = {}
        while self.sessions.num_calls:
            found |= dict(self.sessions.poll(None))
        return found

    def open(self, key: int, row: dict[str, Any]) -> Answer:
        """A session of a row."""
        self.sessions.open(key, row, seed=0)
        return self.answer()[key]

    def step(self, key: int, action: Any) -> Answer:
        """A turn of the policy."""
        self.sessions.step(key, action)
        return self.answer()[key]


def rows(folder: Path, taskset: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """What the command writes for a taskset: rows as ``reset`` gets them, and schemas of tools."""
    command = [sys.executable, "-m", "rlhf_mcore.environments.verifiers", "--rows", "9", "--out", "rows.jsonl"]
    options = json.dumps({"packages": PACKAGES, "taskset": {"id": taskset}})
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    made = finished([*command, "--tools", "tools.json", "--options", options], folder, environment)
    assert made.returncode == 0, made.stderr
    lines = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    found = [{**line, "prompt": " ".join(message["content"] for message in line["prompt"])} for line in lines]
    return found, json.loads(Path("tools.json").read_text())


def test_an_environment_of_several_turns_is_played_from_its_rows(folder: Path) -> None:
    given, tools = rows(folder, "guess_v1")
    assert [row["prompt"] for row in given] == [f"Be brief. Guess number {number}." for number in range(3)]
    assert (tools, given[2]["extra_info"]) == ([], {"task": 2})
    played = Played("guess_v1")
    for key, row in enumerate(given):
        assert played.open(key, row) == Answer()
    for key in range(3):
        played.sessions.step(key, "1")
    found = played.answer()
    assert [(a.messages, a.reward, a.done) for a in (found[0], found[1], found[2])] == [
        ([{"role": "user", "content": "lower"}], 0.0, False),
        ([], 1.0, True),
        ([{"role": "user", "content": "higher"}], 0.0, False),
    ]
    assert (played.step(2, "2").reward, played.step(0, "0").done) == (1.0, True)
    played.open(3, given[0])
    assert "ValueError: invalid literal for int() with base 10: 'one'" in played.step(3, "one").error
    assert "'Guess number 0.', which is not in the prompt" in played.open(4, given[0] | {"prompt": "Be brief."}).error
    assert "there is no task 7: the taskset has 3" in played.open(5, given[0] | {"extra_info": {"task": 7}}).error
    played.sessions.close_all()
    ended = Played("guess_v1", player={"max_turns": 1})
    ended.open(0, given[0])
    assert (ended.step(0, "1").reward, ended.sessions.num_calls) == (0.0, 0)  # verifiers has ended it, and scored it
    ended.sessions.close_all()
    with pytest.raises(ConfigError, match=r"environment\.options: verifiers does not load .*<redacted>.*nowhere"):
        Played("nowhere", player={"client": {"api_key": "x"}}).open(0, given[0])


def test_tools_of_a_task_are_called_through_their_servers(folder: Path) -> None:
    [row], [tool] = rows(folder, "add_v1")
    assert tool["function"]["description"] == "Add two numbers."
    played = Played("add_v1")
    for key in range(2):
        assert played.open(key, row) == Answer()
    call = {"name": tool["function"]["name"], "arguments": '{"a": 2, "b": 3}'}
    called = {"content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": call}]}
    assert played.step(0, called).messages == [{"role": "tool", "content": "5"}]
    last = played.step(0, {"content": "5", "tool_calls": []})
    assert (last.reward, last.done) == (0.5, True)
    assert "environment.tool_parser is not set" in played.step(1, "5").error
    played.sessions.close_all()


def test_a_conversation_that_is_told_differently_is_refused(folder: Path) -> None:
    played = Played("once_v1")
    assert played.open(0, {"prompt": "first", "extra_info": {"task": 0}}) == Answer()
    assert "tells the turns so far differently than they were" in played.step(0, "well").error
    assert "write the rows by python -m rlhf_mcore" in played.open(1, {"prompt": "first", "extra_info": {}}).error
    played.sessions.close_all()
