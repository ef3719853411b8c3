"""Agents in real worker processes: programs, functions and servers, their results, and agents that do not end."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands import reward_test
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import EnvironmentConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.environments.agents.endpoint import Endpoint, SilentEpisode
from rlhf_mcore.environments.agents.program import UNGRADED
from rlhf_mcore.environments.sessions import StepResult, sessions_of
from rlhf_mcore.own_processes import has_ended
from rlhf_mcore.sandbox.run import machine_level
from tests.commands import wait_for
from tests.messages import expect_error

ASK = """
import json, os, urllib.request

def ask(base_url, api_key):
    body = json.dumps({"messages": [{"role": "user", "content": "q"}]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
FUNCTIONS = (
    ASK
    + """
import asyncio, time
from pathlib import Path

async def play(task, base_url, api_key):
    said = await asyncio.to_thread(ask, base_url, api_key)
    return {"reward": task["ground_truth"] + len(said)}

def plain(task, base_url, api_key):
    ask(base_url, api_key)

async def hangs(task, base_url, api_key):
    await asyncio.sleep(600)

def well(task, base_url, api_key):
    return float(ask(base_url, api_key) == "")

async def few(task, base_url):
    return 1

async def yields(task, base_url, api_key):
    yield 1

async def mute(task, base_url, api_key):
    return 1

async def blocks(task, base_url, api_key):
    time.sleep(60)

async def gives_up(task, base_url, api_key):
    await asyncio.wait_for(asyncio.sleep(60), 0.01)

async def misspells(task, base_url, api_key):
    return {"rewrad": 1}

async def fails_once(task, base_url, api_key):
    if not Path("tried").exists():
        Path("tried").touch()
        raise KeyError("what")
    return 1

async def dies(task, base_url, api_key):
    os._exit(3)

async def codes(task, base_url, api_key, container):
    await asyncio.to_thread(ask, base_url, api_key)
    assert (await container.run("cat x.txt")).stdout == "hello"
    await container.write({"x.txt": task["ground_truth"]})

def plain_codes(task, base_url, api_key, container):
    ask(base_url, api_key)
    container.write({"x.txt": task["ground_truth"]})
    assert container.read("x.txt").decode() == task["ground_truth"] and container.run("true").ok
    return 0.75 if task["ground_truth"] == "own" else None

async def loses(task, base_url, api_key, container):
    await asyncio.to_thread(ask, base_url, api_key)
    with open("tries", "a") as file:
        file.write("x")
    if task["ground_truth"] == "always" or len(Path("tries").read_text()) == 1:
        os.kill(container._sandbox._process.pid, 9)
        await asyncio.sleep(0.5)  # its child still answers before it notices
    try:
        await container.run("true")
    except Exception:
        return 0.0  # as an agent that swallows what goes wrong
    return 1.0

async def odd(task, base_url, api_key):
    return "much"
"""
)
PROGRAM = (
    ASK
    + """
import subprocess, sys, time
task = json.loads(input())
kind = task["ground_truth"]
if kind == "hangs":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30); open('escaped', 'w')"])
    time.sleep(600)
if kind == "floods":
    while True:
        print("x" * 4096)
if kind == "killed":
    os.kill(os.getpid(), 9)
if kind == "fails":
    sys.exit("no idea")
assert "HF_TOKEN" not in os.environ
ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
print("thinking")
print(json.dumps({"reward": 0.25}) if kind == "rewards" else "the end", flush=True)
print("a warning at exit", file=sys.stderr)
"""
)
ROW = {"ground_truth": 3, "extra_info": {}}
NAMESPACES = pytest.mark.skipif(not machine_level().reaches("namespaces"), reason="this machine gives no namespaces")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "secret")
    Path("functions.py").write_text(FUNCTIONS)
    Path("program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint("127.0.0.1")
    yield served
    served.close_all()


def play(endpoint: Endpoint, *truths: Any, **agent: Any) -> list[StepResult]:
    """The ends of episodes, one for each ground truth. The policy says nothing."""
    own = EnvironmentConfig(function="agent", workers=1, timeout_s=agent.pop("reset_s", 5.0))
    own.container.kind = agent.pop("kind", None)
    extra = agent.pop("extra", {})
    for name, value in agent.items():
        setattr(own.agent, name, value)
    sessions = sessions_of(own, 1, str(Path.cwd()))

    async def play_one(truth: Any) -> StepResult:
        session, api_key = sessions.open({**ROW, "ground_truth": truth, "extra_info": extra}, 1), ""
        try:
            answer = await session.reset()
            if not (answer.done or answer.error):
                api_key = endpoint.open(SilentEpisode())
                answer = await session.step({"base_url": endpoint.url, "api_key": api_key})
            return answer
        finally:
            endpoint.close(api_key)
            session.close()

    async def play_all() -> list[StepResult]:
        return await asyncio.gather(*map(play_one, truths))

    try:
        return run(play_all())
    finally:
        sessions.close_all()


def test_functions(endpoint: Endpoint) -> None:
    assert [answer.reward for answer in play(endpoint, 3, 4, function="functions.py:play")] == [3.0, 4.0]
    [plain] = play(endpoint, 3, function="functions.py:plain")
    assert (plain.messages, plain.done, plain.error) == ([{"role": UNGRADED, "content": ""}], True, "")
    [odd] = play(endpoint, 3, function="functions.py:odd")
    assert odd.error == "ended with 'much' (str): the reward must be a number"
    [late] = play(endpoint, 3, function="functions.py:hangs", timeout_s=0.3)
    assert late.error == "took longer than environment.agent.timeout_s=0.3 s" and late.timed_out
    [blocked] = play(endpoint, 3, function="functions.py:blocks", timeout_s=0.2, reset_s=0.8)
    assert "the 1 s of environment.agent.timeout_s" in blocked.error and "await" in blocked.error and blocked.timed_out
    [own] = play(endpoint, 3, function="functions.py:gives_up")  # another timeout than ours
    assert "raised TimeoutError" in own.error and not own.timed_out
    [other] = play(endpoint, 3, function="functions.py:misspells")
    assert other.error == "ended with {'rewrad': 1} (dict): it has no key 'reward'"
    [first] = play(endpoint, 3, function="functions.py:fails_once")
    assert first.error.startswith("raised KeyError: 'what' (functions.py, line ")
    Path("tried").unlink()
    [second] = play(endpoint, 3, function="functions.py:fails_once", retries=1)
    assert second.reward == 1.0 and not second.error
    [lost] = play(endpoint, 3, function="functions.py:dies")
    assert "exit" in lost.error or "ended" in lost.error


def test_programs(endpoint: Endpoint) -> None:
    command = [sys.executable, "program.py"]
    begun = time.monotonic()
    rewards, silent, fails, killed, floods, hangs = play(
        endpoint,
        "rewards",
        "silent",
        "fails",
        "killed",
        "floods",
        "hangs",
        command=command,
        timeout_s=6.0,
        max_output_kib=64.0,
    )
    assert rewards.reward == 0.25 and not rewards.error
    assert silent.messages == [{"role": UNGRADED, "content": "the end"}] and not silent.error
    assert fails.error == "ended with exit code 1; it last printed: 'no idea'"
    assert "was killed by signal 9" in killed.error
    assert floods.error == "printed more than 65536 bytes (environment.agent.max_output_kib)"
    assert "took longer than environment.agent.timeout_s=6 s" in hangs.error
    assert time.monotonic() - begun < 25 and not Path("escaped").exists()
    with expect_error(ConfigError, field="environment.agent.command", value="no-such-program"):
        play(endpoint, 1, command=["no-such-program"])
    with expect_error(ConfigError, field="environment.agent.command", remedy="write it as a list, [python, agent.py]"):
        play(endpoint, 1, command=["python program.py --token=secret"])
    for name, remedy in {"few": "let it take (task, base_url, api_key)", "yields": "return the reward instead"}.items():
        with expect_error(ConfigError, field="environment.agent.function", value=f"functions.py:{name}", remedy=remedy):
            play(endpoint, 1, function=f"functions.py:{name}")


STAYS = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("begun", "w") as file:
    file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""


def test_a_program_ends_with_its_worker_and_all_that_it_has_started(endpoint: Endpoint) -> None:
    Path("stays.py").write_text(STAYS)
    own = EnvironmentConfig(function="agent", workers=1)
    own.agent.command = [sys.executable, "stays.py"]
    sessions, begun = sessions_of(own, 1, str(Path.cwd())), Path("begun")

    async def play_until_begun() -> None:
        session = sessions.open(ROW, 1)
        await session.reset()
        api_key = endpoint.open(SilentEpisode())
        step = asyncio.create_task(session.step({"base_url": endpoint.url, "api_key": api_key}))
        while not (begun.exists() and begun.read_text().endswith("\n")):
            assert not step.done()
            await asyncio.sleep(0.05)
        endpoint.close(api_key)

    try:
        run(asyncio.wait_for(play_until_begun(), 60))
    finally:
        sessions.close_all()  # kills the worker
    pids = [int(pid) for pid in begun.read_text().split()]
    wait_for(lambda: all(map(has_ended, pids)), 30)


def test_servers(endpoint: Endpoint) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kind = told["task"]["ground_truth"]
            content = {"rewards": b'{"reward": 0.5}', "floods": b"[" * 10**6, "junk": b"junk"}.get(kind, b"{}")
            assert told["base_url"].startswith("http://127.0.0.1:") and len(told["api_key"]) == 43
            self.send_response(500 if kind == "fails" else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/play"
        rewards, silent, floods, junk, fails = play(endpoint, "rewards", "silent", "floods", "junk", "fails", url=url)
    finally:
        server.shutdown()
        server.server_close()
    assert rewards.reward == 0.5 and silent.messages == [{"role": UNGRADED, "content": ""}]
    [gone] = play(endpoint, "rewards", url=url)
    assert "did not answer: Cannot connect to host 127.0.0.1" in gone.error
    assert "answered more than 65536 bytes" in floods.error and junk.error == "answered with invalid JSON: 'junk'"
    assert "answered with status 500" in fails.error


CODES: Any = {"kind": "sandbox", "extra": {"container": {"files": {"x.txt": "hello"}, "tests": "grep -q bye x.txt"}}}


@NAMESPACES
def test_tests_in_the_container_grade_what_a_function_has_not_graded(endpoint: Endpoint) -> None:
    codes = play(endpoint, "bye", "no", function="functions.py:codes", **CODES)
    assert [(answer.reward, answer.error, answer.messages) for answer in codes] == [(1.0, "", []), (0.0, "", [])]
    plain = play(endpoint, "bye", "no", "own", function="functions.py:plain_codes", **CODES)
    assert [answer.reward for answer in plain] == [1.0, 0.0, 0.75]
    [broken] = play(endpoint, "x", function="functions.py:codes", kind="sandbox", extra={"container": {"imag": "x"}})
    assert "extra_info.container has unknown fields: imag" in broken.error
    with pytest.raises(ConfigError, match=r"takes a container, but the run has none; set environment\.container\.kind"):
        play(endpoint, "x", function="functions.py:codes")


@NAMESPACES
def test_an_episode_whose_container_is_lost_begins_again_once(endpoint: Endpoint) -> None:
    [again] = play(endpoint, "once", function="functions.py:loses", **CODES)
    assert again.reward == 1.0 and not again.error and Path("tries").read_text() == "xx"
    Path("tries").unlink()
    [lost] = play(endpoint, "always", function="functions.py:loses", **CODES)
    assert "the container has ended" in lost.error and Path("tries").read_text() == "xx"


def test_an_agent_is_tried_before_a_run(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    keys = {"function": "agent", "max_tokens": 999, "workers": 1}
    Path("run.yaml").write_text(
        json.dumps(
            {"model": {"path": "m"}, "data": {"train": ["rows.jsonl"], "answer_key": "answer"}, "environment": keys}
        )
    )
    assert reward_test.main(["run.yaml", "environment.agent.function=functions.py:well"]) == 0
    assert "2 episodes with one empty turn, 0 failed" in capsys.readouterr().out
    wrong = {
        "odd": "in step: ended with 'much'",
        "plain": "ended without a reward; return one, or set environment.score=reward",
        "mute": "ended without a turn of the policy",
    }
    for name, problem in wrong.items():
        assert reward_test.main(["run.yaml", f"environment.agent.function=functions.py:{name}"]) == 2
        assert problem in capsys.readouterr().out
    hangs = ["environment.agent.function=functions.py:hangs", "environment.agent.timeout_s=0.2"]
    assert reward_test.main(["run.yaml", *hangs]) == 2
    assert "raise environment.agent.timeout_s" in capsys.readouterr().err
