"""Test the client of reward servers against a misbehaving server."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RemoteRewardConfig, RewardConfig
from rlhf_mcore.coroutines import Background
from rlhf_mcore.rewards import http_pool
from rlhf_mcore.rewards.reward import build_reward
from tests.messages import expect_error
from tests.unit.rewards.http_server import (
    Request,
    Scripted,
    answer,
    response,
    rows,
    score_remotely,
    serve_script,
    trajectory,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


def double_scores(request: Request) -> bytes:
    """Return a correct answer. Each response is a number, and its score is twice this number."""
    items = request.json()["items"]
    return answer({"scores": [{"score": 2 * float(item["solution_str"]), "parts": {"n": 1}} for item in items]})


def first_then_right(*first: Callable[[Request], bytes | None]) -> Callable[[Request], bytes | None]:
    """Answer one request with each of ``first``, and then correctly."""
    left, lock = list(first), threading.Lock()

    def reply(request: Request) -> bytes | None:
        with lock:
            chosen = left.pop(0) if left else double_scores
        return chosen(request)

    return reply


def hangs(state: list[Scripted]) -> Callable[[Request], bytes | None]:
    def reply(request: Request) -> None:
        state[0].released.wait(300)

    return reply


BAD = {
    "garbage": (response(b"\x00\xff not json"), "is not JSON"),
    "an empty body": (response(b""), "is not JSON"),
    "a page": (response(b"<html>login</html>"), "<html>login"),
    "NaN": (response(b'{"scores": [{"score": NaN}]}'), "NaN is not a JSON number"),
    "beyond float32": (answer({"scores": [{"score": 1e39}]}), "score is not finite"),
    "a huge int": (response(b'{"scores": [{"score": ' + b"9" * 400 + b"}]}"), "score is not finite"),
    "a text": (answer({"scores": [{"score": "1.0"}]}), "is not a number: '1.0'"),
    "no score": (answer({"scores": [{}]}), "is not a number: 'None'"),
    "too few": (answer({"scores": []}), "has 0 scores for 1 responses"),
    "too many": (answer({"scores": [{"score": 1}, {"score": 1}]}), "has 2 scores for 1 responses"),
    "a list": (answer([1.0]), "has no list 'scores'"),
    "a bad part": (answer({"scores": [{"score": 1, "parts": {"a": None}}]}), r"parts\['a'\] is not a number"),
    "too many parts": (
        answer({"scores": [{"score": 1, "parts": {str(n): 0 for n in range(65)}}]}),
        "at most 64 numbers",
    ),
    "nested": (response(b"[" * 50_000), "is not JSON"),
    "huge": (response(b" " * (2**16 + 2**15 + 1)), "above the size limit"),
    "compressed": (response(b"x", "200 OK", "Content-Encoding: gzip"), "is compressed"),
    "status 500": (answer({"error": "oh"}, "500 Oh"), r"status 500 \(.*oh"),
    "status 400": (answer({"error": "what?"}, "400 Bad"), r"status 400 \(.*what"),
    "status 429": (answer({}, "429 Slowly", "Retry-After: 0"), "status 429"),
    "a closed connection": (None, "could not be reached"),
    "half of an answer": (response(b"x" * 100)[:-50], "could not be reached"),
    "no HTTP": (b"hello\r\n\r\n", "could not be reached"),
}


@pytest.mark.parametrize("name", BAD)
def test_fault_35_a_bad_answer_ends_in_the_policy(name: str) -> None:
    sent, cause = BAD[name]
    with serve_script(lambda request: sent) as server:
        (score,) = score_remotely([trajectory("5")], server.url)
        assert (score.value, score.failure) == (0.0, "error")
        with pytest.raises(AssertionError, match=cause):
            raise AssertionError(score.cause)
        tries = len(server.seen)
        assert tries == (1 if name == "status 400" else 4)
        with pytest.raises(ConfigError, match=r"prompt 'train-0', sample 3, .*set reward\.on_error=zero"):
            score_remotely([trajectory("5")], server.url, on_error="fail", tries=1)


@pytest.mark.parametrize("name", [name for name in BAD if name != "status 400"])
def test_what_goes_wrong_once_is_tried_again(name: str) -> None:
    with serve_script(first_then_right(lambda request: BAD[name][0], lambda request: BAD[name][0])) as server:
        assert [score.value for score in score_remotely(rows(40), server.url, batch_size=8, concurrency=2)] == [
            2.0 * n for n in range(40)
        ]


def test_fault_35_a_server_that_hangs_costs_its_deadline() -> None:
    held: list[Scripted] = []
    with serve_script(hangs(held)) as server:
        held.append(server)
        (score,) = score_remotely([trajectory("1")], server.url, timeout_s=0.1, tries=2)
        assert score.failure == "timeout" and "reward.remote.timeout_s=0.1" in score.cause and len(server.seen) == 2
        (score,) = score_remotely([trajectory("1")], server.url, longest_s=0.2, timeout_s=50.0)
        assert score.failure == "timeout" and len(server.seen) == 3


def test_an_item_that_spoils_its_batch_is_found() -> None:
    def reply(request: Request) -> bytes:
        if any(item["solution_str"] == "13" for item in request.json()["items"]):
            return answer({}, "500 Unlucky")
        return double_scores(request)

    with serve_script(reply) as server:
        found = score_remotely(rows(32), server.url, batch_size=32, tries=2)
    assert [score.failure for score in found] == [None] * 13 + ["error"] + [None] * 18
    assert [score.value for score in found] == [0.0 if n == 13 else 2.0 * n for n in range(32)]


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Elsewhere"])
def test_fault_35_a_redirect_is_not_followed(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "s3cret-token")
    with serve_script(double_scores) as elsewhere:
        target = f"{elsewhere.url}/stolen?t=s3cret-token"
        words = r"redirects to .*; set reward\.remote\.url to the final address"
        moved = serve_script(lambda request: response(b"", status, f"Location: {target}"))
        with moved as server, pytest.raises(ConfigError, match=words) as error:
            score_remotely(rows(1), server.url, token_env="KEY")
        assert not elsewhere.seen and "s3cret-token" not in str(error.value)
        assert server.seen[0].headers["authorization"] == "Bearer s3cret-token"


def test_fault_35_no_server_ends_the_run_after_its_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with expect_error(ConfigError, value=10, remedy="reward.remote.timeout_s"):
        score_remotely(rows(20), f"http://127.0.0.1:{port}", longest_s=1.0)


def test_a_server_that_is_down_is_left_alone_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server fails thirty times.

    Without the breaker, eight concurrent requests would find this. With it, one request does after the fifth failure.
    """
    monkeypatch.setattr(http_pool, "LONGEST_PAUSE_S", 0.02)
    at_a_time, most, lock = [0], [0], threading.Lock()
    failures = [30]

    def reply(request: Request) -> bytes:
        with lock:
            at_a_time[0] += 1
            failures[0] -= 1
            failing = failures[0] >= 0
            if failures[0] < 20 and failing:
                most[0] = max(most[0], at_a_time[0])
        sent = answer({}, "503 Down") if failing else double_scores(request)
        with lock:
            at_a_time[0] -= 1
        return sent

    with serve_script(reply) as server:
        found = score_remotely(rows(64), server.url, batch_size=8, tries=101)
    assert [score.value for score in found] == [2.0 * n for n in range(64)]
    assert most[0] == 1


def test_groups_are_sent_while_others_are_waited_for() -> None:
    gate = threading.Event()

    def reply(request: Request) -> bytes:
        if request.json()["items"][0]["solution_str"] == "0":
            gate.wait(60)
        return double_scores(request)

    with serve_script(reply) as server:
        reward = build_reward(RewardConfig(remote=RemoteRewardConfig(url=server.url)))
        thread = Background("test")
        slow, quick = thread.start(reward.score(rows(1))), thread.start(reward.score(rows(3)[1:]))
        assert [score.value for score in quick.result()] == [2.0, 4.0]
        gate.set()
        assert [score.value for score in slow.result()] == [0.0]
        thread.close()
        reward.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "ScorePool"]


def test_retries_do_not_touch_the_random_numbers_of_training() -> None:
    with serve_script(first_then_right(*[lambda request: BAD["status 500"][0]] * 3)) as server:
        before = random.getstate()
        score_remotely(rows(4), server.url)
        assert random.getstate() == before


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "is not set; export it"),
        ("", "is not set"),
        ("a\nb", "spaces or non-printable characters"),
        ("ü", "characters"),
    ],
)
def test_a_token_that_cannot_be_sent_is_refused(
    value: str | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("KEY", value)
    with pytest.raises(ConfigError, match=rf"reward\.remote\.token_env is 'KEY'.*{problem}"):
        score_remotely(rows(1), "http://127.0.0.1:1", token_env="KEY")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("localhost:8900", "is not a URL"),
        ("ftp://host/x", "is not a URL"),
        ("http://me:pass@host/score", "contains a login"),
        ("http://host:99999/score", "is not a URL"),
        ("http://host/score?key=1", "contains a query"),
        ("http://host/a b", "a space"),
    ],
)
def test_a_wrong_address_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        build_reward(RewardConfig(remote=RemoteRewardConfig(url=url)))
    assert "pass" not in str(error.value)
    with pytest.raises(ConfigError, match="are both set"):
        build_reward(RewardConfig(function="a.py:f", remote=RemoteRewardConfig(url="http://host/score")))


def test_a_proxy_of_the_environment_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_script(double_scores) as server, serve_script(double_scores) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setitem(os.environ, name, proxy.url)
        assert score_remotely(rows(2), server.url)[1].value == 2.0
        assert not proxy.seen
