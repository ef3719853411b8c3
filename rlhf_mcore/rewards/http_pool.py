"""A pool whose workers are on a server, which gets items over HTTP.

A request is retried with growing pauses until its deadline, if a retry may help. After several failures in a row, a circuit
breaker pauses all requests to the server. Then one request tests the server before the others continue. Redirects are rejected,
because they would send responses and token to another server. The size of answers is limited while they are read.

JSON format of requests and answers, which both sides validate::

    {"items": [{"data_source", "solution_str", "ground_truth", "extra_info", "prompt", "seed"}, ...]}
    {"scores": [{"score": 0.5, "parts": {"format": 1.0}} or {"error": "cause"}, ...]}
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.pool import MAX_LOST_IN_A_ROW, BackgroundPool, Outcome

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

    from rlhf_mcore.config.schema import JudgeConfig, RemoteRewardConfig

TRIES = 5  # per request, with growing pauses
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between tries; the second is also the longest pause of the circuit breaker
FAILURES_TO_OPEN = 5  # failures in a row that open the circuit breaker
RETRIED = (408, 425, 429)  # statuses below 500 that a retry may change
MISTAKES = (401, 403, 404, 405)  # statuses that are the same for every response
MAX_ANSWER_BYTES = 2**15  # per score
MAX_ERROR_CHARS = 2000
_MAX_PARTS = 64
_MAX_NAME_CHARS = 100
_MAX_FLOAT32 = 3.4e38  # scores are sent as float32


@dataclass(slots=True)
class _TryFailed(Exception):
    """A try without an answer."""

    cause: str
    timed_out: bool = False
    retry_after_s: float = 0.0
    server_works: bool = False  # the server answered, even if with an error
    one_by_one: bool = False  # one item may be the cause; retry the items of the batch separately
    is_final: bool = False


def token_of(variable: str | None, key: str) -> str | None:
    """Read the token from an environment variable.

    Raises:
        ConfigError: the variable is not set, or its value cannot be a header value.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        without = "leave it out" if key.startswith("--") else f"set {key}=null"
        raise ConfigError(f"{key} is {variable!r}, but that environment variable is not set; export it, or {without}")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{key} is {variable!r}, whose value contains spaces or non-printable characters; export a valid token"
        )
    return token


class HttpPool(BackgroundPool):
    """Sends items to a server, ``batch_size`` per request.

    Args:
        key: name of ``cfg`` in the configuration, for messages.
        cfg: address, limits and the variable with the token. No message contains the token.
        path: path after the address.
        longest_s: limit in seconds for a request with all its tries, in addition to ``TRIES`` times ``cfg.timeout_s``.

    Raises:
        ConfigError: the token is missing.
    """

    max_answer_bytes: int  # per item

    def __init__(
        self,
        key: str,
        cfg: RemoteRewardConfig | JudgeConfig,
        path: str = "",
        batch_size: int = 1,
        longest_s: float = math.inf,
    ) -> None:
        assert cfg.url is not None
        super().__init__(f"{key}.url={cfg.url}", batch_size)
        self._key, self._cfg = key, cfg
        self._deadline_s = min(TRIES * cfg.timeout_s, longest_s)
        self._url = f"{cfg.url.rstrip('/')}{path}" if path else cfg.url
        self._token = token_of(cfg.token_env, f"{key}.token_env")
        self._slots, self._breaker = asyncio.Semaphore(cfg.concurrency), _Breaker()
        self._random = random.Random()  # a separate generator, to keep the random numbers of training reproducible
        self._lost_in_a_row = 0
        self._session: ClientSession | None = None  # used in the pool's thread only

    @abstractmethod
    def encode(self, items: Sequence[bytes]) -> bytes:
        """Return the request body for some items."""

    @abstractmethod
    def decode(self, answer: Any, count: int) -> list[Outcome]:
        """Return the outcome of each item of a request.

        Raises:
            WireError: the answer has another format.
        """

    async def _answer(self, items: Sequence[bytes], stop_at_failure: bool) -> list[Outcome]:
        """Return the outcomes of a batch. If the server rejects it, send its items one by one."""
        async with self._slots:
            deadline = time.monotonic() + self._deadline_s
            try:
                return await self._ask(items, deadline, TRIES)
            except _TryFailed as failed:
                if len(items) == 1 or not failed.one_by_one:
                    return self._lose(len(items), failed, stop_at_failure)
            outcomes = []
            for item in items:
                try:
                    outcomes += await self._ask([item], deadline, 1)
                except _TryFailed as failed:
                    outcomes += self._lose(1, failed, stop_at_failure)
            return outcomes

    def _lose(self, count: int, failed: _TryFailed, stop_at_failure: bool) -> list[Outcome]:
        self._lost_in_a_row += count
        if not stop_at_failure and self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            self._lost_in_a_row = 0
            raise ConfigError(
                f"{self.name} gave no result for at least {MAX_LOST_IN_A_ROW} responses in a row; for the last response it "
                f"{failed.cause}. Check the server, or raise {self._key}.timeout_s"
            )
        return [Outcome(lost=failed.cause, timed_out=failed.timed_out)] * count

    async def _ask(self, items: Sequence[bytes], deadline: float, tries: int) -> list[Outcome]:
        """Return the outcomes of some items, after at most ``tries`` tries.

        Raises:
            _TryFailed: the last try failed.
            ConfigError: no try can succeed.
        """
        body = self.encode(items)
        for number in range(tries):
            try:
                await self._breaker.admit(deadline)
                try:
                    outcomes = self.decode(await self._try(body, len(items), deadline), len(items))
                except WireError as error:
                    raise _TryFailed(f"sent an invalid answer ({error})", one_by_one=True, server_works=True) from error
            except _TryFailed as failed:
                self._breaker.record(failed.server_works)
                pause = self._random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
                pause = max(pause, failed.retry_after_s)
                if failed.is_final or number == tries - 1 or time.monotonic() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)
            except BaseException:  # the request was cancelled; let another request test the server
                self._breaker.is_trying = False
                raise
            else:
                self._breaker.record(True)
                self._lost_in_a_row = 0
                return outcomes
        raise AssertionError("a try ends with an answer or an error")

    async def _try(self, body: bytes, count: int, deadline: float) -> Any:
        """Send a request and return the JSON of its answer."""
        from aiohttp import ClientError, ClientTimeout

        timeout_s = max(min(self._cfg.timeout_s, deadline - time.monotonic()), 0.001)
        session, timeout = await self._open_session(), ClientTimeout(total=timeout_s)
        try:
            async with session.post(self._url, data=body, allow_redirects=False, timeout=timeout) as response:
                content = await _read_bounded(response.content, 2**16 + count * self.max_answer_bytes)
        except asyncio.TimeoutError as error:
            cause = f"gave no answer within {timeout_s:.3g} s ({self._key}.timeout_s={self._cfg.timeout_s:g})"
            raise _TryFailed(cause, timed_out=True, one_by_one=True) from error
        except (ClientError, OSError, ValueError) as error:
            raise _TryFailed(f"could not be reached ({str(error) or type(error).__name__})") from error
        if content is None:
            raise _TryFailed("sent an answer above the size limit", one_by_one=True, server_works=True)
        self._check_status(response, self._without_token(excerpt(content)))
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise WireError("is compressed, although the request allows identity encoding only")
        return read_json(content)

    async def _open_session(self) -> ClientSession:
        """Return the session, which is closed with the pool's thread."""
        from aiohttp import ClientSession, DummyCookieJar, TCPConnector

        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token}"
            connector = TCPConnector(limit=self._cfg.concurrency)
            self._session = ClientSession(
                connector=connector, headers=headers, cookie_jar=DummyCookieJar(), auto_decompress=False
            )
            self._background.resources.push_async_callback(self._session.close)
        return self._session

    def _check_status(self, response: ClientResponse, shown: str) -> None:
        """Raise the error for a status, unless it is a success."""
        status, retry_after_s = response.status, _seconds(response.headers.get("Retry-After"))
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            where = self._without_token(repr(response.headers.get("Location", "")[:200]))
            raise ConfigError(
                f"{self.name} redirects to {where}, which is not followed; set {self._key}.url to the final address"
            )
        cause = f"answered with status {status} ({shown})"
        if status in MISTAKES:
            raise ConfigError(f"{self.name} {cause}; correct {self._key}.url or {self._key}.token_env")
        if status >= 500:
            raise _TryFailed(cause, one_by_one=True, retry_after_s=retry_after_s)
        if status in RETRIED:
            raise _TryFailed(cause, server_works=True, retry_after_s=retry_after_s)
        raise _TryFailed(cause, server_works=True, one_by_one=True, is_final=True)

    def _without_token(self, text: str) -> str:
        return text.replace(self._token, "<redacted>") if self._token else text


class ScorePool(HttpPool):
    """Requests scores from ``rlhf-mcore serve-reward``, or from a server with the JSON format in this module's docstring."""

    max_answer_bytes = MAX_ANSWER_BYTES

    def encode(self, items: Sequence[bytes]) -> bytes:
        """Return the request body for some items."""
        return b'{"items":[' + b",".join(items) + b"]}"

    def decode(self, answer: Any, count: int) -> list[Outcome]:
        """Return the scores in an answer."""
        return read_scores(answer, count)


class _Breaker:
    """Opens after ``FAILURES_TO_OPEN`` failures in a row. Then only single requests, with pauses between them, test the server."""

    def __init__(self) -> None:
        self._failures, self._next_try_at, self.is_trying = 0, 0.0, False

    async def admit(self, deadline: float) -> None:
        """Wait for permission to send a request.

        Raises:
            _TryFailed: the deadline has passed.
        """
        while self._failures >= FAILURES_TO_OPEN:
            now = time.monotonic()
            if now >= deadline:
                raise _TryFailed(
                    f"was not called, because it had failed {self._failures} times in a row", timed_out=True
                )
            if now >= self._next_try_at and not self.is_trying:
                self.is_trying = True
                return
            await asyncio.sleep(min(0.05 if self.is_trying else self._next_try_at - now, deadline - now))

    def record(self, server_works: bool) -> None:
        """Record the result of a request."""
        self.is_trying = False
        self._failures = 0 if server_works else self._failures + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** max(self._failures - FAILURES_TO_OPEN, 0), LONGEST_PAUSE_S)
        self._next_try_at = time.monotonic() + pause_s


async def _read_bounded(content: Any, most: int) -> bytes | None:
    """Read an answer, or return None if it exceeds ``most`` bytes."""
    read = bytearray()
    async for piece in content.iter_chunked(2**16):
        read += piece
        if len(read) > most:
            return None
    return bytes(read)


def _seconds(retry_after: str | None) -> float:
    """Return the seconds in a Retry-After header; 0 if it is absent or a date."""
    return min(float(retry_after), LONGEST_PAUSE_S) if retry_after is not None and retry_after.isdecimal() else 0.0


# ------------------------------------------------------------------------------------------------- the JSON that travels
class WireError(ValueError):
    """A text does not follow the agreed format. The message names the mistake."""


def read_json(text: bytes) -> Any:
    """Parse a JSON text with finite numbers only.

    Raises:
        WireError: the text is invalid or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"is not JSON ({str(error) or type(error).__name__}): {excerpt(text)}") from error


def read_scores(value: Any, count: int) -> list[Outcome]:
    """Read the scores in a server's answer to ``count`` items.

    Raises:
        WireError: the number of scores is wrong, or a score is not a finite number.
    """
    scores = value.get("scores") if isinstance(value, Mapping) else None
    if not isinstance(scores, list):
        raise WireError("has no list 'scores'")
    if len(scores) != count:
        raise WireError(f"has {len(scores)} scores for {count} responses")
    return [_read_score(entry, f"scores[{index}]") for index, entry in enumerate(scores)]


def excerpt(text: bytes) -> str:
    """Shorten a text for a message."""
    return repr(text[:200].decode(errors="replace")) + ("..." if len(text) > 200 else "")


def _read_score(entry: Any, where: str) -> Outcome:
    if not isinstance(entry, Mapping):
        raise WireError(f"{where} is not an object")
    if "error" in entry:
        cause = f"answered {str(entry['error'])[:MAX_ERROR_CHARS]!r}"
        return Outcome(lost=cause, timed_out=entry.get("kind") == "timeout")
    parts = entry.get("parts") or {}
    if not isinstance(parts, Mapping) or len(parts) > _MAX_PARTS:
        raise WireError(f"{where}.parts is not an object with at most {_MAX_PARTS} numbers")
    if any(len(name) > _MAX_NAME_CHARS for name in parts):
        raise WireError(f"{where}.parts has a name of more than {_MAX_NAME_CHARS} characters")
    numbers = {name: _number(value, f"{where}.parts[{name!r}]") for name, value in parts.items()}
    return Outcome({"score": _number(entry.get("score"), f"{where}.score"), "parts": numbers})


def _number(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)):
        raise WireError(f"{where} is not a number: {str(value)[:80]!r}")
    if not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32 or math.isnan(value):  # not converted; float() of a huge int raises
        raise WireError(f"{where} is not finite")
    return float(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
