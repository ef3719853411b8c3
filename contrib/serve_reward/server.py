"""Serve a reward over HTTP: ``POST /score`` (format: ``rlhf_mcore.rewards.http_pool``) and ``GET /health``."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from aiohttp import web

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.http_pool import MAX_ERROR_CHARS, WireError, read_json
from rlhf_mcore.rewards.reward import make_text_trajectory
from rlhf_mcore.types import Prompt, Score

if TYPE_CHECKING:
    from rlhf_mcore.protocols import RewardFunction

MAX_REQUEST_BYTES = 2**26
MAX_ITEMS = 4096  # per request
MAX_REQUESTS = 64  # scored concurrently; the server asks other clients to retry
BODY_TIMEOUT_S = 60.0  # limit for receiving a request


class RewardServer:
    """Score the responses of requests with ``reward``. Requests need ``token``, unless it is None."""

    def __init__(self, reward: RewardFunction, token: str | None = None) -> None:
        self._reward, self._token, self._busy = reward, token, 0
        self._threads = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="score")

    def application(self) -> web.Application:
        """Build the HTTP application."""
        application = web.Application(client_max_size=MAX_REQUEST_BYTES)
        application.add_routes([web.post("/score", self._score), web.get("/health", self._health)])
        return application

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _score(self, request: web.Request) -> web.Response:
        if self._token is not None:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return _refuse(401, "the header Authorization does not contain the token of this server")
        if request.content_type != "application/json":  # browsers do not let a page send this type to another site
            return _refuse(415, "the header Content-Type must be application/json")
        if self._busy >= MAX_REQUESTS:
            return _refuse(503, f"{MAX_REQUESTS} requests are being scored", {"Retry-After": "1"})
        self._busy += 1
        try:
            items = read_items(read_json(await asyncio.wait_for(request.read(), BODY_TIMEOUT_S)))
            scores = await asyncio.get_running_loop().run_in_executor(self._threads, self._scores, items)
        except asyncio.TimeoutError:
            return _refuse(408, f"the request was not sent within {BODY_TIMEOUT_S:g} s")
        except WireError as error:
            return _refuse(400, f"the request {error}")
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"the request has more than {MAX_REQUEST_BYTES:,} bytes")
        except ConfigError as error:  # the request is at fault, for example a data source without rules
            return _refuse(422, str(error))
        finally:
            self._busy -= 1
        return web.json_response({"scores": [_answer(score) for score in scores]})

    def _scores(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        rows = []
        for number, item in enumerate(items):
            # The prompt's name seeds random numbers of a reward function, so the same response always gets the same numbers.
            name = str(item.get("seed", number))
            prompt = Prompt(
                name, number, [], item.get("prompt", ""), item.get("data_source", "unknown"), item.get("ground_truth")
            )
            prompt.extra_info = dict(item.get("extra_info", {}))
            rows.append(make_text_trajectory(prompt, item["solution_str"]))
        return run(self._reward.score(rows)) if rows else []


def read_items(value: Any) -> list[dict[str, Any]]:
    """Read the items of a request.

    Raises:
        WireError: the request is malformed.
    """
    items = value.get("items") if isinstance(value, Mapping) else None
    if not isinstance(items, list):
        raise WireError("has no list 'items'")
    if len(items) > MAX_ITEMS:
        raise WireError(f"has {len(items)} items; at most {MAX_ITEMS} are allowed")
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise WireError(f"items[{index}] is not an object")
        if not isinstance(item.get("solution_str"), str):
            raise WireError(f"items[{index}] has no text 'solution_str'")
        if not isinstance(item.get("data_source", ""), str) or not isinstance(item.get("prompt", ""), str):
            raise WireError(f"items[{index}]: 'data_source' and 'prompt' must be texts")
        if not isinstance(item.get("extra_info", {}), Mapping):
            raise WireError(f"items[{index}]: 'extra_info' must be an object")
    return items


def _answer(score: Score) -> dict[str, Any]:
    if score.failure is not None:
        return {"error": (score.cause or score.failure)[:MAX_ERROR_CHARS], "kind": score.failure}
    return {"score": score.value, "parts": score.parts}


def _refuse(status: int, problem: str, headers: Mapping[str, str] | None = None) -> web.Response:
    text = json.dumps({"error": problem[:MAX_ERROR_CHARS]})
    return web.Response(text=text, status=status, content_type="application/json", headers=headers)
