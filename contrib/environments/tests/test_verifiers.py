"""The verifiers adapter with the real package, in worker processes. RLHF_MCORE_TEST_VERIFIERS names the folder of the package.

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
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import EnvironmentConfig
from rlhf_mcore.environments.agents.conversation import Conversation
from rlhf_mcore.environments.agents.endpoint import Endpoint
from rlhf_mcore.environments.agents.episode import AgentRollout, AgentRules
from rlhf_mcore.environments.sessions import sessions_of
from rlhf_mcore.sampling.rollouts import RolloutLimits, RolloutSetup
from rlhf_mcore.types import Job, Prompt, Sampling, Trajectory
from tests.commands import ROOT, run_command
from tests.messages import expect_error
from tests.unit.environments.conftest import Scripted, play_jobs, tokenizer
from tests.unit.environments.test_agents import parse

__all__ = ["tokenizer"]

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
    """Change to the directory from which a run would start."""
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
    """Episodes of a taskset in one process, with scripted turns of the policy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, taskset: str, says: Any, **env: Any) -> None:
        own = EnvironmentConfig(function="verifiers", workers=1, timeout_s=60.0)
        own.options = {"packages": PACKAGES, "taskset": {"id": taskset}, "env": env}
        own.agent.timeout_s = 60.0
        self.sessions, endpoint = sessions_of(own, 1, str(Path.cwd())), Endpoint("127.0.0.1")
        rollout = AgentRollout(self.sessions, endpoint, Conversation(tokenizer, parse), AgentRules(fails=False))
        self.engine = Scripted(tokenizer, says)
        self.setup = RolloutSetup(rollout, RolloutLimits(max_turns=8, max_total=4000), in_order=False)

    def play(self, *rows: dict[str, Any]) -> list[Trajectory]:
        """Run an episode for each row."""
        sampling = Sampling(max_new_tokens=99, seed=5)
        prompts = [Prompt(str(k), k, [1], row["prompt"], extra_info=row["extra_info"]) for k, row in enumerate(rows)]
        return play_jobs(self.engine, self.setup, [Job(k, prompt, 0, sampling, 1) for k, prompt in enumerate(prompts)])


def rows(folder: Path, taskset: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the files of the command for a taskset: rows in the form that ``reset`` receives, and tool schemas."""
    command = [sys.executable, "-m", "rlhf_mcore_contrib.environments.verifiers", "--rows", "9", "--out", "rows.jsonl"]
    options = json.dumps({"packages": PACKAGES, "taskset": {"id": taskset}})
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    made = run_command([*command, "--tools", "tools.json", "--options", options], folder, environment)
    assert made.returncode == 0, made.stderr
    lines = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    found = [{**line, "prompt": " ".join(message["content"] for message in line["prompt"])} for line in lines]
    return found, json.loads(Path("tools.json").read_text())


def said(episode: Trajectory) -> list[tuple[str, str]]:
    """Return the turns of policy and environment."""
    return [(turn.writer, turn.text) for turn in episode.turns if turn.writer != "prompt"]


def test_an_environment_of_several_turns_is_played_from_its_rows(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    given, tools = rows(folder, "guess_v1")
    assert [row["prompt"] for row in given] == [f"Be brief. Guess number {number}." for number in range(3)]
    assert (tools, given[2]["extra_info"]) == ([], {"task": 2})

    def guess(text: str, seed: int) -> str:
        return "0" if "lower" in text else "2" if "higher" in text else "1"

    played = Played(tokenizer, "guess_v1", guess)
    low, right, high = played.play(*given)
    assert [episode.score.value for episode in (low, right, high) if episode.score] == [1.0, 1.0, 1.0]
    assert said(right) == [("policy", "1")] and right.sequences == low.sequences == ()
    assert [text for _, text in said(high)] == ["1", "<end>\n<user>higher<end>\n<assistant>", "2"]
    assert "Be brief." in tokenizer.decode(high.token_ids)
    [lost] = played.play(given[0] | {"extra_info": {"task": 7}})
    assert lost.score is not None and "there is no task 7: the taskset has 3" in lost.score.cause
    [odd] = played.play(given[0] | {"extra_info": {}})
    assert odd.score is not None and "write the rows by python -m rlhf_mcore" in odd.score.cause
    played.sessions.close_all()
    ended = Played(tokenizer, "guess_v1", guess, player={"max_turns": 1})
    [cut] = ended.play(given[0])  # verifiers has ended it, and scored it
    assert cut.score is not None and cut.score.value == 0.0 and cut.score.failure is None
    ended.sessions.close_all()
    with expect_error(ConfigError, field="environment.options", value=("<redacted>", "nowhere")):
        Played(tokenizer, "nowhere", guess, player={"client": {"api_key": "x"}}).play(given[0])


def test_tools_of_a_task_are_called_through_their_servers(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    [row], [tool] = rows(folder, "add_v1")
    assert tool["function"]["description"] == "Add two numbers."
    call = f"call:{tool['function']['name']}:" + '{"a": 2,  "b": 3}'
    played = Played(tokenizer, "add_v1", lambda text, seed: "5" if "<tool>5" in text else call)
    [episode] = played.play(row)
    assert episode.score is not None and (episode.score.value, episode.score.cause) == (0.5, "")
    assert said(episode)[0] == ("policy", call) and said(episode)[-1] == ("policy", "5") and not episode.sequences
    played.sessions.close_all()


def test_a_conversation_that_is_told_differently_is_a_branch(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    played = Played(tokenizer, "once_v1", lambda text, seed: "well")
    [episode] = played.play({"prompt": "first", "extra_info": {"task": 0}})
    assert episode.score is not None and episode.score.cause == ""
    assert len(episode.sequences) == 2 and said(episode) == [("policy", "well"), ("policy", "well")]
    played.sessions.close_all()
