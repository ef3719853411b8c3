"""A pool whose workers are on a server: items are sent over HTTP, by a thread with an event loop of its own.

A request is tried again if that may help, later and later, until its deadline. A server that has failed several times in a row
is left alone for a while (a circuit breaker), then asked by one request before the others. Redirects are refused: they would bring
responses and token to somebody else. Answers are bounded before they are read.

The JSON that travels. Both sides check what they get::

    {"items": [{"data_source", "solution_str", "ground_truth", "extra_info", "prompt", "seed"}, ...]}
    {"scores": [{"score": 0.5, "parts": {"format": 1.0}} or {"error": "why there is none"}, ...]}
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.pool import MAX_LOST_IN_A_ROW, Collect, Outcome

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

    from rlhf_mcore.config.schema import JudgeConfig, RemoteRewardConfig

TRIES = 5  # of a request, further and further apart
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between tries; the second is also how long a broken server is left alone
FAILURES_TO_OPEN = 5  # in a row, after which the circuit breaker opens
RETRIED = (408, 425, 429)  # statuses below 500 that another try may change
MISTAKES = (401, 403, 404, 405)  # statuses that no response will ever change
MAX_ANSWER_BYTES = 2**15  # of one score
MAX_ERROR_CHARS = 2000
_MAX_PARTS = 64
_MAX_NAME_CHARS = 100
_MAX_FLOAT32 = 3.4e38  # scores travel as float32

T = TypeVar("T")


@dataclass(slots=True)
class _TryFailed(Exception):
    """A try that got no answer."""

    cause: str
    timed_out: bool = False
    retry_after_s: float = 0.0
    server_works: bool = False  # whatever it has answered
    one_by_one: bool = False  # an item may be to blame: sent alone, the others of the batch may get through
    is_final: bool = False


def token_of(variable: str | None, key: str) -> str | None:
    """Read the token that an environment variable holds.

    Raises:
        ConfigError: it holds none, or one that does not fit into a header.
    """
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        without = "leave it out" if key.startswith("--") else f"set {key}=null"
        raise ConfigError(f"{key} is {variable!r}, but that environment variable is not set; export it, or {without}")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            f"{key} is {variable!r}, whose value has characters that no token has; export it without them"
        )
    return token


class HttpPool(ABC):
    """Sends items to a server, ``batch_size`` in a request.

    Args:
        key: of ``cfg`` in the configuration, for messages.
        cfg: address, limits and the variable with the token, which is in no message.
        path: behind the address.
        longest_s: limit for a request with all its tries, in addition to ``TRIES`` times ``cfg.timeout_s``.

    Raises:
        ConfigError: the token is not there.
    """

    max_answer_bytes: int  # of one item

    def __init__(
        self,
        key: str,
        cfg: RemoteRewardConfig | JudgeConfig,
        path: str = "",
        batch_size: int = 1,
        longest_s: float = math.inf,
    ) -> None:
        assert cfg.url is not None
        self.name = f"{key}.url={cfg.url}"
        self._key, self._cfg, self._batch_size = key, cfg, batch_size
        self._deadline_s = min(TRIES * cfg.timeout_s, longest_s)
        self._url = f"{cfg.url.rstrip('/')}{path}" if path else cfg.url
        self._token = token_of(cfg.token_env, f"{key}.token_env")
        self._slots, self._breaker = asyncio.Semaphore(cfg.concurrency), _Breaker()
        self._random = random.Random()  # not the one that training draws from
        self._lost_in_a_row = 0
        self._client = _Client(self.name, self._token, cfg.concurrency)
        self.close = weakref.finalize(self, self._client.close)

    @abstractmethod
    def encode(self, items: Sequence[bytes]) -> bytes:
        """Return the body of a request for some items."""

    @abstractmethod
    def decode(self, answer: Any, count: int) -> list[Outcome]:
        """Return the outcome of each item of a request.

        Raises:
            WireError: the answer is something else.
        """

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Collect:
        """Begin with items, from any thread; see :class:`rlhf_mcore.rewards.pool.Pool`.

        What is returned raises ConfigError if no request will ever succeed, or ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        future = self._client.run(self._outcomes(items, stop_at_failure))

        def collect() -> list[Outcome | None]:
            try:
                return future.result()
            except CancelledError as error:
                raise RuntimeError(f"the client of {self.name} was closed") from error
            except BaseException:
                future.cancel()  # Ctrl-C: nobody will ask again
                raise

        return collect

    # --------------------------------------------------------------------------------------------------- in the thread
    async def _outcomes(self, items: Sequence[bytes], stop_at_failure: bool) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = [None] * len(items)

        async def send(start: int) -> bool:
            batch = await self._batch(items[start : start + self._batch_size], stop_at_failure)
            outcomes[start : start + len(batch)] = batch
            return any(outcome.problem for outcome in batch)

        tasks = [asyncio.create_task(send(start)) for start in range(0, len(items), self._batch_size)]
        try:
            for task in asyncio.as_completed(tasks):
                if await task and stop_at_failure:
                    break
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return outcomes

    async def _batch(self, items: Sequence[bytes], stop_at_failure: bool) -> list[Outcome]:
        """Return the outcomes of a batch. If it is refused, its items are sent one by one."""
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
                f"{self.name} gave no result for {MAX_LOST_IN_A_ROW} responses in a row or more; for the last of them it "
                f"{failed.cause}: look at the server, or give it more time with {self._key}.timeout_s"
            )
        return [Outcome(lost=failed.cause, timed_out=failed.timed_out)] * count

    async def _ask(self, items: Sequence[bytes], deadline: float, tries: int) -> list[Outcome]:
        """Return the outcomes of some items, after as many tries as are allowed.

        Raises:
            _TryFailed: the last try.
            ConfigError: no try will ever succeed.
        """
        body = self.encode(items)
        for number in range(tries):
            try:
                await self._breaker.admit(deadline)
                try:
                    outcomes = self.decode(await self._try(body, len(items), deadline), len(items))
                except WireError as error:
                    raise _TryFailed(f"answered with what {error}", one_by_one=True, server_works=True) from error
            except _TryFailed as failed:
                self._breaker.record(failed.server_works)
                pause = self._random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
                pause = max(pause, failed.retry_after_s)
                if failed.is_final or number == tries - 1 or time.monotonic() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)
            except BaseException:  # nobody waits for this request any more: another one may try the server
                self._breaker.is_trying = False
                raise
            else:
                self._breaker.record(True)
                self._lost_in_a_row = 0
                return outcomes
        raise AssertionError("a try ends in an answer or an error")

    async def _try(self, body: bytes, count: int, deadline: float) -> Any:
        """Send a request, and return the JSON of its answer."""
        from aiohttp import ClientError, ClientTimeout

        timeout_s = max(min(self._cfg.timeout_s, deadline - time.monotonic()), 0.001)
        session, timeout = self._client.session(), ClientTimeout(total=timeout_s)
        try:
            async with session.post(self._url, data=body, allow_redirects=False, timeout=timeout) as response:
                content = await _read_bounded(response.content, 2**16 + count * self.max_answer_bytes)
        except asyncio.TimeoutError as error:
            cause = f"gave no answer within {timeout_s:.3g} s ({self._key}.timeout_s={self._cfg.timeout_s:g})"
            raise _TryFailed(cause, timed_out=True, one_by_one=True) from error
        except (ClientError, OSError, ValueError) as error:
            raise _TryFailed(f"could not be asked ({str(error) or type(error).__name__})") from error
        if content is None:
            raise _TryFailed("answered with more than is read of an answer", one_by_one=True, server_works=True)
        self._check_status(response, self._without_token(excerpt(content)))
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise WireError("is compressed, which nobody has asked for")
        return read_json(content)

    def _check_status(self, response: ClientResponse, shown: str) -> None:
        """Raise what a status means, unless it is success."""
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
    """Asks a reward server for scores, ``rlhf-mcore serve-reward`` or one that answers as the head of this module describes it."""

    max_answer_bytes = MAX_ANSWER_BYTES

    def encode(self, items: Sequence[bytes]) -> bytes:
        """Return the request for some items."""
        return b'{"items":[' + b",".join(items) + b"]}"

    def decode(self, answer: Any, count: int) -> list[Outcome]:
        """Return their scores."""
        return read_scores(answer, count)


class _Client:
    """A thread with an event loop and a session of aiohttp, started when there is something to run."""

    def __init__(self, name: str, token: str | None, concurrency: int) -> None:
        self._name, self._token, self._concurrency = name, token, concurrency
        self._lock, self._closed = Lock(), False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._session: ClientSession | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin with some work, from any thread."""
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError(f"the client of {self._name} is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = Thread(target=self._loop.run_forever, name="reward-client", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def session(self) -> ClientSession:
        """Return the session, from the thread."""
        from aiohttp import ClientSession, DummyCookieJar, TCPConnector

        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            if self._token is not None:
                headers["Authorization"] = f"Bearer {self._token}"
            connector = TCPConnector(limit=self._concurrency)
            self._session = ClientSession(
                connector=connector, headers=headers, cookie_jar=DummyCookieJar(), auto_decompress=False
            )
        return self._session

    def close(self) -> None:
        """Cancel all work, and end the thread."""
        with self._lock:
            self._closed = True
        if self._loop is None or self._thread is None:
            return
        if self._thread is current_thread():  # which has had the last reference to the pool
            self._loop.stop()
        elif self._thread.is_alive():  # not so in a process that was forked from its own
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


class _Breaker:
    """Opens when a server has failed ``FAILURES_TO_OPEN`` times in a row; then one request at a time may try it, now and then."""

    def __init__(self) -> None:
        self._failures, self._next_try_at, self.is_trying = 0, 0.0, False

    async def admit(self, deadline: float) -> None:
        """Wait for the permission to ask.

        Raises:
            _TryFailed: there is none before the deadline.
        """
        while self._failures >= FAILURES_TO_OPEN:
            now = time.monotonic()
            if now >= deadline:
                raise _TryFailed(
                    f"was not asked, because it had failed {self._failures} times in a row", timed_out=True
                )
            if now >= self._next_try_at and not self.is_trying:
                self.is_trying = True
                return
            await asyncio.sleep(min(0.05 if self.is_trying else self._next_try_at - now, deadline - now))

    def record(self, server_works: bool) -> None:
        """Count how a request has ended."""
        self.is_trying = False
        self._failures = 0 if server_works else self._failures + 1
        pause_s = min(FIRST_PAUSE_S * 2 ** max(self._failures - FAILURES_TO_OPEN, 0), LONGEST_PAUSE_S)
        self._next_try_at = time.monotonic() + pause_s


async def _read_bounded(content: Any, most: int) -> bytes | None:
    """Read an answer; None if it has more than ``most`` bytes."""
    read = bytearray()
    async for piece in content.iter_chunked(2**16):
        read += piece
        if len(read) > most:
            return None
    return bytes(read)


def _seconds(retry_after: str | None) -> float:
    """Read the header Retry-After, if it is a number of seconds, not a date."""
    return min(float(retry_after), LONGEST_PAUSE_S) if retry_after is not None and retry_after.isdecimal() else 0.0


# ------------------------------------------------------------------------------------------------- the JSON that travels
class WireError(ValueError):
    """A text that does not follow the agreed form. The message names the mistake."""


def read_json(text: bytes) -> Any:
    """Parse a JSON text that has finite numbers only.

    Raises:
        WireError: it is something else, or nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"is not JSON ({str(error) or type(error).__name__}): {excerpt(text)}") from error


def read_scores(value: Any, count: int) -> list[Outcome]:
    """Read the scores in a server's answer to ``count`` items.

    Raises:
        WireError: they are not as many, or not finite numbers.
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
        raise WireError(f"{where} is no object")
    if "error" in entry:
        cause = f"answered {str(entry['error'])[:MAX_ERROR_CHARS]!r}"
        return Outcome(lost=cause, timed_out=entry.get("kind") == "timeout")
    parts = entry.get("parts") or {}
    if not isinstance(parts, Mapping) or len(parts) > _MAX_PARTS:
        raise WireError(f"{where}.parts is no object of at most {_MAX_PARTS} numbers")
    if any(len(name) > _MAX_NAME_CHARS for name in parts):
        raise WireError(f"{where}.parts has a name of more than {_MAX_NAME_CHARS} characters")
    numbers = {name: _number(value, f"{where}.parts[{name!r}]") for name, value in parts.items()}
    return Outcome({"score": _number(entry.get("score"), f"{where}.score"), "parts": numbers})


def _number(value: Any, where: str) -> float:
    if not isinstance(value, (int, float)):
        raise WireError(f"{where} is no number: {str(value)[:80]!r}")
    if not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32 or math.isnan(value):  # compared: float() of a huge int raises
        raise WireError(f"{where} is not finite")
    return float(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
