"""The server of ``rlhf-mcore serve-reward`` with the client of ``reward.remote``."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig, RuleConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore_contrib.serve_reward.server import RewardServer
from rlhf_mcore_contrib.serving import check_host
from tests.unit.rewards.http_server import rows, score_remotely, trajectory

pytestmark = pytest.mark.usefixtures("short_pauses")


@contextmanager
def reward_server(server: RewardServer) -> Iterator[str]:
    """Start a reward server at a free port of the loopback. Yields its address."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(server.application(), access_log=None)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_scores_of_a_server_are_those_of_its_reward(batch_size: int) -> None:
    rules = [RuleConfig(name="final_number", weight=0.5), RuleConfig(name="format", weight=0.25)]
    made = [trajectory(text, n) for n, text in enumerate(["#### 42", "42", "#### 41", "é\ud800\x00 \\boxed{42}"] * 5)]
    local = build_reward(RewardConfig(rules=rules))
    with reward_server(RewardServer(local)) as url:
        found = score_remotely(made, url, batch_size=batch_size)
    assert found == run(local.score(made))
    assert [score.value for score in found[:4]] == [0.75, 0.0, 0.25, 0.75]


def test_what_travels_is_what_a_function_is_given(tmp_path: Path) -> None:
    """Send numbers beyond 64 bits, nested values, and the seed, which gives a response the same random score on every server."""
    source = (
        "import random\ndef grade(data_source, solution_str, ground_truth, extra_info):\n"
        "    right = (data_source, ground_truth, extra_info) == ('sums', {'a': [1, None]}, {'big': 2**80})\n"
        "    return {'score': random.random(), 'right': float(right)}\n"
    )
    (tmp_path / "mine.py").write_text(source)
    made = [trajectory("x", n, truth={"a": [1, None]}, big=2**80) for n in range(6)]
    local = build_reward(RewardConfig(function=f"{tmp_path}/mine.py:grade", workers=1))
    with reward_server(RewardServer(local)) as url:
        first, second = (score_remotely(made, url, batch_size=size) for size in (2, 3))
    local.close()
    assert first == second and len({score.value for score in first}) == 6
    assert {score.parts["right"] for score in first} == {1.0}


def test_what_a_served_function_fails_on_has_no_score_and_a_cause(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def grade(source, text, truth, info): return 1 / int(text)")
    local = build_reward(RewardConfig(function=f"{tmp_path}/mine.py:grade", workers=1, on_error="zero"))
    with reward_server(RewardServer(local)) as url:
        found = score_remotely(rows(3), url)
        assert [(score.value, score.failure) for score in found] == [(0.0, "error"), (1.0, None), (0.5, None)]
        assert "ZeroDivisionError" in found[0].cause and "prompt 'train-0', sample 3" in found[0].cause
        with pytest.raises(
            ConfigError, match=r"reward\.remote\.url=.* prompt 'train-0', sample 3, .*ZeroDivisionError"
        ):
            score_remotely(rows(3), url, on_error="fail")
        # If the reward rejects a response, here for its data source, the rest of the batch is still scored.
        table = RewardServer(build_reward(RewardConfig(sources={"sums": [RuleConfig(name="exact_match")]})))
        with reward_server(table) as other:
            mixed = [trajectory("42"), trajectory("42", 1), trajectory("42", 2)]
            mixed[1].prompt.data_source = "mystery"
            found = score_remotely(mixed, other)
            assert [score.failure for score in found] == [None, "error", None] and "mystery" in found[1].cause
    local.close()


def ask(url: str, body: bytes, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        (b"", 400, "is not JSON"),
        (b"[1]", 400, "has no list 'items'"),
        (b'{"items": [{"solution_str": "x", "ground_truth": NaN}]}', 400, "NaN is not a JSON number"),
        (b'{"items": [{}]}', 400, "items\\[0\\] has no text 'solution_str'"),
        (b'{"items": [{"solution_str": "x", "extra_info": 3}]}', 400, "'extra_info' must be an object"),
        (
            b'{"items": [' + b",".join([b'{"solution_str": ""}'] * 4097) + b"]}",
            400,
            "4097 items; at most 4096 are allowed",
        ),
        (b"[" * 100_000, 400, "is not JSON"),
        (b" " * (2**26 + 1), 413, "more than 67,108,864 bytes"),
        (b'{"items": [{"solution_str": "x"}]}', 422, "prompt '0' has no ground truth"),
    ],
)
def test_a_server_names_what_is_wrong_with_a_request(body: bytes, status: int, problem: str) -> None:
    with reward_server(RewardServer(build_reward(RewardConfig()))) as url:
        found, content = ask(f"{url}/score", body)
        assert found == status
        with pytest.raises(AssertionError, match=problem):
            raise AssertionError(content["error"])
        assert ask(f"{url}/score", b'{"items": []}') == (200, {"scores": []})  # the server still works


def test_a_server_with_a_token_answers_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RewardServer(build_reward(RewardConfig(rules=[RuleConfig(name="exact_match")])), "s3cret-token")
    monkeypatch.setenv("RIGHT", "s3cret-token")
    monkeypatch.setenv("WRONG", "another")
    with reward_server(server) as url:
        assert score_remotely([trajectory("42")], url, token_env="RIGHT")[0].value == 1.0
        for name in ("WRONG", None):
            with pytest.raises(
                ConfigError, match=r"status 401 .*correct reward\.remote\.url or reward\.remote\.token_env"
            ) as error:
                score_remotely([trajectory("42")], url, token_env=name)
            assert "another" not in str(error.value)
        assert (
            ask(f"{url}/score", b"{}", **{"Content-Type": "text/plain", "Authorization": "Bearer s3cret-token"})[0]
            == 415
        )
        with urllib.request.urlopen(f"{url}/health", timeout=60) as health:
            assert json.loads(health.read()) == {"status": "ok"}


@pytest.mark.parametrize(
    ("host", "token", "problem"),
    [
        ("0.0.0.0", True, "is not a private address"),
        ("::", True, "is not a private address"),
        ("8.8.8.8", True, "is not a private address"),
        ("example.com", True, "is not an address"),
        ("10.1.2.3", False, "--token-env"),
    ],
)
def test_a_server_does_not_listen_to_everybody(host: str, token: bool, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_host(host, token)
    for good in (("127.0.0.1", False), ("localhost", False), ("::1", False), ("10.1.2.3", True)):
        check_host(*good)


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process at the end of the block. Otherwise, after a failed assertion, the block would wait for it forever."""
    try:
        yield
    finally:
        process.kill()


def test_the_command_serves_until_a_signal_comes(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("reward: {rules: [{name: exact_match, weight: 3.0}]}\n")
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "serve-reward", str(tmp_path / "run.yaml"), "--port"]
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True) as served, ending(served):
        assert served.stdout is not None
        what, _, where = served.stdout.readline().partition(" on ")
        assert what == "serving reward.rules=[exact_match * 3]"
        url = where.split()[0].removesuffix("/score")
        assert [score.value for score in score_remotely([trajectory("42"), trajectory("41")], url)] == [3.0, 0.0]
        port = url.rpartition(":")[2]
        taken = subprocess.run([*command, port], capture_output=True, text=True, check=False)
        assert taken.returncode == 2 and f"--port {port}: " in taken.stderr and "Traceback" not in taken.stderr
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 0
