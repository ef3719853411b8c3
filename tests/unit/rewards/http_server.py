"""An HTTP server in a thread of the test that sends exactly the bytes that the test defines, and responses to score."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from rlhf_mcore.config.schema import RemoteRewardConfig, RewardConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards import http_pool
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.types import Prompt, Score, Trajectory
from tests.episodes import single_turn


@dataclass
class Request:
    """A received request."""

    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(value: Any, status: str = "200 OK", *headers: str) -> bytes:
    return response(json.dumps(value).encode(), status, *headers)


@dataclass
class Scripted:
    """The state of a scripted server. ``reply`` returns the bytes for a request; None closes the connection immediately."""

    reply: Callable[[Request], bytes | None]
    url: str = ""
    seen: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)  # releases replies that would wait forever


@contextmanager
def serve_script(reply: Callable[[Request], bytes | None]) -> Iterator[Scripted]:
    """Start a server at a free port of the loopback."""
    state = Scripted(reply)

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            first = self.rfile.readline().decode().split()
            if len(first) < 2:
                return
            headers = {}
            while line := self.rfile.readline().decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            request = Request(first[1], headers, self.rfile.read(int(headers.get("content-length", 0))))
            state.seen.append(request)
            if (sent := state.reply(request)) is not None:
                with suppress(OSError):  # the client has read enough
                    self.wfile.write(sent)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield state
        finally:
            state.released.set()
            server.shutdown()


def scores_of(
    cfg: RewardConfig, given: list[Trajectory], tries: int = http_pool.TRIES, longest_s: float = 60.0
) -> list[Score]:
    """Return the scores of a reward and close it."""
    with (
        mock.patch.object(http_pool, "TRIES", tries),
        closing(build_reward(cfg, longest_s=longest_s)) as reward,
    ):
        return run(reward.score(given))


def trajectory(text: str, index: int = 0, truth: Any = "42", **extra: Any) -> Trajectory:
    prompt = Prompt(f"train-{index}", index, [1], "What?", data_source="sums", ground_truth=truth, extra_info=extra)
    return single_turn(prompt, 3, [5], [-0.1], text, "stop", 0)


def rows(count: int) -> list[Trajectory]:
    return [trajectory(str(number), number) for number in range(count)]


def score_remotely(
    given: list[Trajectory],
    url: str,
    *,
    on_error: str = "zero",
    token_env: str | None = None,
    tries: int = 4,
    longest_s: float = 60.0,
    **settings: Any,
) -> list[Score]:
    remote = RemoteRewardConfig(url=f"{url}/score", token_env=token_env, **{"timeout_s": 20.0, **settings})
    return scores_of(RewardConfig(remote=remote, on_error=on_error), given, tries, longest_s)
