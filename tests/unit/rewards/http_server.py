"""HTTP servers in threads of the test: one that answers what a test makes it answer, down to the bytes, and a reward server."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from rlhf_mcore.commands.serve_reward.server import RewardServer
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.types import Score, Trajectory


@dataclass
class Request:
    """What has come."""

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
    """``reply`` makes the bytes that a request gets; None closes the connection at once."""

    reply: Callable[[Request], bytes | None]
    url: str = ""
    seen: list[Request] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)  # ends those that wait for ever


@contextmanager
def scripted(reply: Callable[[Request], bytes | None]) -> Iterator[Scripted]:
    """A server at a free port of the loopback."""
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


@contextmanager
def reward_server(server: RewardServer) -> Iterator[str]:
    """A reward server at a free port of the loopback; yields its address."""
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


def scores_of(cfg: RewardConfig, given: list[Trajectory]) -> list[Score]:
    """What a reward gives, which is closed afterwards."""
    with closing(build_reward(cfg)) as reward:
        return reward.score(given)
