"""A pool whose workers are on a server: items travel by HTTP, in a thread of the pool's own.

A request is tried again where that may help, later and later, until its deadline. A server that has failed several times in a row
is left alone for a while (a circuit breaker), then asked by one request before the others. Redirects are refused: they would bring
responses and token to somebody else. Answers are bounded before they are read.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, Protocol

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.pool import MAX_LOST_IN_A_ROW, Job, Outcome
from rlhf_mcore.rewards.wire import WireError, excerpt, read_json

if TYPE_CHECKING:
    from aiohttp import ClientSession

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between tries; the second is also how long a broken server is left alone
FAILURES_TO_OPEN = 5  # in a row, after which the circuit breaker opens
RETRIED = (408, 425, 429)  # statuses below 500 that another try may change
MISTAKES = (401, 403, 404, 405)  # statuses that no response will ever change


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask of a server at a time, and how long it waits. ``keys``: of the configuration, for messages."""

    keys: str
    batch_size: int
    concurrency: int
    timeout_s: float  # of one try
    deadline_s: float  # of a request, with all its tries
    retries: int


class Codec(Protocol):
    """How items become a request, and its answer outcomes."""

    @property
    def max_answer_bytes(self) -> int:
        """Of one item."""
        ...

    def encode(self, items: Sequence[bytes]) -> bytes: ...

    def decode(self, answer: Any, count: int) -> list[dict[str, Any]]:
        """What pool workers answer, for each item.

        Raises:
            WireError: it is something else.
        """
        ...


@dataclass(slots=True)
class _Failed(Exception):
    """A try that has not come to an answer."""

    cause: str
    timed_out: bool = False
    retry_after_s: float = 0.0
    is_of_items: bool = False  # they may be to blame: alone, the others of the batch may get through
    is_final: bool = False
    works: bool = False  # the server, whatever it has answered


def token_of(variable: str | None, key: str) -> str | None:
    """The token that an environment variable holds.

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


class HttpPool:
    """Sends items to ``url``.

    Args:
        name: what answers, for messages.
        token: for the header Authorization; it is in no message.
    """

    def __init__(self, name: str, url: str, token: str | None, codec: Codec, limits: Limits) -> None:
        self._keeper = _Keeper(name, url, token, codec, limits)
        self.close = weakref.finalize(self, _close, self._keeper, os.getpid())

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Job:
        """Begin with items, each a JSON text. As that of :class:`rlhf_mcore.rewards.pool.WorkerPool`."""
        return self._keeper.submit(items, stop_at_failure)


class _Keeper:
    """The thread of a pool, with its event loop."""

    def __init__(self, name: str, url: str, token: str | None, codec: Codec, limits: Limits) -> None:
        self._name, self._url, self._token, self._codec, self._limits = name, url, token, codec, limits
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._lock = Lock()
        self._closing = False
        self._lost_in_a_row = 0
        self._random = random.Random()  # not the one that training draws from

    def submit(self, items: Sequence[bytes], stop_at_failure: bool) -> Job:
        with self._lock:
            if self._closing:
                raise RuntimeError(f"the client of {self._name} is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._slots = asyncio.Semaphore(self._limits.concurrency)
                self._breaker = _Breaker()
                self._jobs: dict[Job, asyncio.Task[None]] = {}
                self._thread = Thread(target=self._serve, args=(self._loop,), name="reward-client", daemon=True)
                self._thread.start()
            job = Job(items, stop_at_failure, self._wake)
            self._loop.call_soon_threadsafe(self._begin, job)
        return job

    def close(self) -> None:
        """End the thread. Who still waits is told so."""
        with self._lock:
            self._closing, thread, loop = True, self._thread, self._loop
        if loop is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            if thread is not current_thread():
                thread.join()

    def _wake(self) -> None:
        with self._lock:
            if self._loop is not None and not self._closing:
                self._loop.call_soon_threadsafe(self._cancel_abandoned)

    # ------------------------------------------------------------------------------------------ in the pool's own thread
    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._open())
            loop.run_forever()
        finally:
            for job, task in list(self._jobs.items()):
                task.cancel()
                job.end(RuntimeError(f"the client of {self._name} was closed"))
            loop.run_until_complete(self._shut())
            loop.close()

    async def _open(self) -> None:
        from aiohttp import ClientSession, DummyCookieJar, TCPConnector

        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        self._session: ClientSession = ClientSession(
            connector=TCPConnector(limit=self._limits.concurrency),
            headers=headers,
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
        )

    async def _shut(self) -> None:
        await asyncio.gather(
            *(task for task in asyncio.all_tasks() if task is not asyncio.current_task()), return_exceptions=True
        )
        await self._session.close()

    def _begin(self, job: Job) -> None:
        assert self._loop is not None
        self._jobs[job] = self._loop.create_task(self._run(job))

    def _cancel_abandoned(self) -> None:
        for job, task in list(self._jobs.items()):
            if job.abandoned:
                task.cancel()

    async def _run(self, job: Job) -> None:
        size = self._limits.batch_size
        everything = range(len(job.items))
        tasks = [
            asyncio.create_task(self._batch(job, everything[start : start + size])) for start in everything[::size]
        ]
        error: Exception | None = None
        try:
            for task in asyncio.as_completed(tasks):
                await task
                if job.is_over:
                    break
        except (ConfigError, asyncio.CancelledError) as caught:
            error = caught if isinstance(caught, ConfigError) else RuntimeError("nobody waits any more")
        except Exception as caught:  # a mistake of ours: nobody may wait for ever
            error = RuntimeError(f"the client of {self._name} failed: {caught!r}")
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del self._jobs[job]
            job.end(error)

    async def _batch(self, job: Job, indices: Sequence[int]) -> None:
        """The outcomes of some items. Where a batch is refused, its items are sent one by one."""
        async with self._slots:
            deadline = time.monotonic() + self._limits.deadline_s
            try:
                answers = await self._ask([job.items[index] for index in indices], deadline, self._limits.retries)
            except _Failed as failed:
                if len(indices) == 1 or not failed.is_of_items:
                    self._lose(job, indices, failed)
                    return
                answers = None
            if answers is not None:
                self._finish(job, indices, answers)
                return
            for index in indices:
                try:
                    self._finish(job, [index], await self._ask([job.items[index]], deadline, 0))
                except _Failed as failed:
                    self._lose(job, [index], failed)

    def _finish(self, job: Job, indices: Sequence[int], answers: Sequence[dict[str, Any]]) -> None:
        self._lost_in_a_row = 0
        for index, answer in zip(indices, answers, strict=True):
            timed_out = bool(answer.pop("timeout", False))
            outcome = Outcome(lost=answer["error"], timed_out=True) if timed_out else Outcome(answer)
            job.finish(index, outcome)

    def _lose(self, job: Job, indices: Sequence[int], failed: _Failed) -> None:
        for index in indices:
            job.finish(index, Outcome(lost=failed.cause, timed_out=failed.timed_out))
        self._lost_in_a_row += len(indices)
        if not job.stop_at_failure and self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            self._lost_in_a_row = 0
            raise ConfigError(
                f"{self._name} gave no result for {MAX_LOST_IN_A_ROW} responses in a row or more; for the last of them it "
                f"{failed.cause}: look at the server, or give it more with {self._limits.keys}.deadline_s and .timeout_s"
            )

    async def _ask(self, items: Sequence[bytes], deadline: float, retries: int) -> list[dict[str, Any]]:
        """The answers to some items, after as many tries as are allowed.

        Raises:
            _Failed: the last try's.
            ConfigError: no try will ever succeed.
        """
        body = self._codec.encode(items)
        for number in range(retries + 1):
            try:
                await self._breaker.admitted(deadline)
                try:
                    answer = await self._try(body, len(items), deadline)
                    answers = self._codec.decode(answer, len(items))
                except WireError as error:
                    raise _Failed(f"answered with what {error}", is_of_items=True, works=True) from error
            except _Failed as failed:
                self._breaker.note(failed.works)
                pause = self._random.uniform(0.5, 1.0) * min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S)
                pause = max(pause, failed.retry_after_s)
                if failed.is_final or number == retries or time.monotonic() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)
            else:
                self._breaker.note(True)
                return answers
        raise AssertionError("a try ends in an answer or an error")

    async def _try(self, body: bytes, count: int, deadline: float) -> Any:
        from aiohttp import ClientError, ClientTimeout

        keys, timeout_s = self._limits.keys, max(min(self._limits.timeout_s, deadline - time.monotonic()), 0.001)
        try:
            timeout = ClientTimeout(total=timeout_s)
            async with self._session.post(self._url, data=body, allow_redirects=False, timeout=timeout) as response:
                content = await _bounded(response.content, 2**16 + count * self._codec.max_answer_bytes)
        except asyncio.TimeoutError as error:
            cause = f"gave no answer within {timeout_s:.3g} s ({keys}.timeout_s={self._limits.timeout_s:g})"
            raise _Failed(cause, timed_out=True, is_of_items=True) from error
        except (ClientError, OSError, ValueError) as error:
            raise _Failed(f"could not be asked ({str(error) or type(error).__name__})") from error
        if content is None:
            raise _Failed("answered with more than is read of an answer", is_of_items=True, works=True)
        status, shown = response.status, self._without_token(excerpt(content))
        if 200 <= status < 300:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise WireError("is compressed, which nobody has asked for")
            return read_json(content)
        if 300 <= status < 400:
            where = self._without_token(repr(response.headers.get("Location", "")[:200]))
            raise ConfigError(
                f"{self._name} redirects to {where}, which is not followed; set {keys}.url to the final address"
            )
        cause = f"answered with status {status} ({shown})"
        if status in MISTAKES:
            raise ConfigError(f"{self._name} {cause}; correct {keys}.url or {keys}.token_env")
        if status >= 500:
            raise _Failed(cause, is_of_items=True, retry_after_s=_seconds(response.headers.get("Retry-After")))
        if status in RETRIED:
            raise _Failed(cause, works=True, retry_after_s=_seconds(response.headers.get("Retry-After")))
        raise _Failed(cause, works=True, is_of_items=True, is_final=True)

    def _without_token(self, text: str) -> str:
        return text.replace(self._token, "<redacted>") if self._token else text


class _Breaker:
    """Opens when a server has failed ``FAILURES_TO_OPEN`` times in a row; then one request at a time may try it, now and then."""

    def __init__(self) -> None:
        self._failures, self._closed_again_at, self._probing = 0, 0.0, False

    async def admitted(self, deadline: float) -> None:
        """Wait for the permission to ask.

        Raises:
            _Failed: there is none before the deadline.
        """
        while self._failures >= FAILURES_TO_OPEN:
            now = time.monotonic()
            if now >= deadline:
                raise _Failed(f"was not asked, because it had failed {self._failures} times in a row", timed_out=True)
            if now >= self._closed_again_at and not self._probing:
                self._probing = True
                return
            await asyncio.sleep(min(0.05 if self._probing else self._closed_again_at - now, deadline - now))

    def note(self, works: bool) -> None:
        """How a request has ended."""
        self._probing = False
        self._failures = 0 if works else self._failures + 1
        opened = min(FIRST_PAUSE_S * 2 ** max(self._failures - FAILURES_TO_OPEN, 0), LONGEST_PAUSE_S)
        self._closed_again_at = time.monotonic() + opened


async def _bounded(content: Any, most: int) -> bytes | None:
    """What is sent, or None where that is more than ``most`` bytes."""
    read = bytearray()
    async for piece in content.iter_chunked(2**16):
        read += piece
        if len(read) > most:
            return None
    return bytes(read)


def _seconds(retry_after: str | None) -> float:
    """The header Retry-After, where it is a number of seconds and no date."""
    return min(float(retry_after), LONGEST_PAUSE_S) if retry_after is not None and retry_after.isdecimal() else 0.0


def _close(keeper: _Keeper, owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked from it
        keeper.close()
