"""Run rollouts as coroutines on an engine, and the passes of the engine between them. Check the completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlhf_mcore.config.errors import join_first
from rlhf_mcore.coroutines import cancel_all
from rlhf_mcore.sampling import followers
from rlhf_mcore.sampling.followers import EnginePass
from rlhf_mcore.types import MAX_LOGPROB, ROUTES, Completion, Request

if TYPE_CHECKING:
    from rlhf_mcore.protocols import StepwiseEngine

T = TypeVar("T")
# Receives the tokens of a response that the engine has sampled so far.
OnTokens = Callable[[Sequence[int]], None]
RunPass = Callable[[EnginePass], Sequence[Completion]]

REMEDY = "Nothing of this step was trained on; start the run again (trainer.max_restarts does so by itself)"
_TOKENS_S = 0.05  # minimum interval between two reports of sampled tokens


class LostTrajectory(RuntimeError):
    """Engines did not return exactly the requested responses. The step was not trained on."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A coroutine of the loop. It is busy while ``num_waits`` is 0, and the engine waits for busy coroutines."""

    number: int  # in starting order
    num_waits: int = 0  # waits for the engine, or for coroutines that wait for the engine


_CURRENT: ContextVar[_Worker] = ContextVar("worker")


@dataclass(slots=True, eq=False)
class _Open:
    """A request without a completion. ``num_cached``: number of its tokens that this engine has probably cached."""

    request: Request
    future: asyncio.Future[Completion]
    worker: _Worker
    on_tokens: OnTokens | None
    num_cached: int


class EngineLoop:
    """Runs coroutines on the lead rank of an engine, and the engine's passes between them.

    In order, the engine runs no pass while a coroutine is busy. Therefore all requests that coroutines make between two passes start
    in one pass, in the order of the coroutines. The runtime of the coroutines does not matter. The bits of responses depend on this
    order, because kernels round differently for other batches. Out of order, the engine runs a pass if there is any request.

    Args:
        engine: the engine of this rank, without other users during the run.
        run_pass: runs a pass on all ranks of the engine, and returns the completions. None: the engine has one rank.
        in_order: whether the engine waits for busy coroutines.
        until_finished: whether a pass ends when a response has finished, instead of after one step. Nothing can interrupt it.
        slots: maximum number of requests in the engine. Further requests are held back. None: no limit.
        places: maximum number of coroutines in a block of ``place``, for a loop in order. None: no limit.
    """

    def __init__(
        self,
        engine: StepwiseEngine,
        run_pass: RunPass | None = None,
        *,
        in_order: bool = True,
        until_finished: bool = False,
        slots: int | None = None,
        places: int | None = None,
    ) -> None:
        self._engine, self._slots = engine, slots
        self._run_pass: RunPass = run_pass or partial(followers.run_pass, engine, None)
        self._in_order, self._until_finished = in_order, until_finished
        self._numbers = count()  # request ids
        self._due: dict[int, _Open] = {}  # to be submitted in the next pass, if there are free slots
        self._running: dict[int, _Open] = {}
        self._moved: dict[int, _Open] = {}  # sampled by another engine
        self._cancelled: list[int] = []  # to be cancelled in the next pass
        self._forgets = self._pauses = False
        self._pass_waits: list[tuple[asyncio.Future[None], _Worker]] = []
        self._free_places = places
        self._place_waits: list[tuple[int, asyncio.Future[None], _Worker]] = []  # a heap, by the number of the worker
        self._num_begun = self._num_live = self._num_busy = 0
        self._changed = asyncio.Event()
        self._next_tokens = 0.0  # time of the next report of sampled tokens

    @property
    def num_in_flight(self) -> int:
        """Number of requests without a completion."""
        return len(self._due) + len(self._running) + len(self._moved)

    @property
    def num_held(self) -> int:
        """Number of requests that wait for a free slot."""
        return max(len(self._due) - self._num_free, 0)

    @property
    def _num_free(self) -> int:
        return len(self._due) if self._slots is None else max(self._slots - len(self._running), 0)

    # ------------------------------------------------------------------------------------------ passes
    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and the passes that it waits for. Returns the result of the coroutine.

        Raises:
            LostTrajectory: the engine answers a request twice or never, or answers a request that was not made.
            RuntimeError: a response is not valid for training.
        """
        task, passes = self.begin(coroutine), asyncio.ensure_future(self.serve())
        try:
            await asyncio.wait([task, passes], return_when=asyncio.FIRST_COMPLETED)
            if passes.done():
                passes.result()
            return task.result()
        finally:
            has_failed = passes.done()
            await cancel_all([task, passes])
            if not has_failed:
                self._make_pass(pauses=True)

    async def serve(self) -> None:
        """Run passes until ``pause``.

        Raises:
            LostTrajectory: same conditions as in ``run``.
        """
        while not self._pauses:
            self._give_places()
            if self._can_pass:
                self._make_pass()
                await asyncio.sleep(0)  # coroutines with a completion continue
            elif self._pass_waits and len(self._pass_waits) == self._num_live:
                self._end_pass_waits()  # no coroutine is left that could make a request
                await asyncio.sleep(0)
            else:
                self._changed.clear()
                await self._changed.wait()
        self._pauses = False
        self._make_pass(pauses=True)

    def pause(self) -> None:
        """End ``serve`` on all ranks of the engine before the next pass. Requests stay in the engine."""
        self._pauses = True
        self._changed.set()

    def forget_prefixes(self) -> None:
        """Forget cached prefixes before the next pass. No request may be in flight."""
        self._forgets = True

    @property
    def _can_pass(self) -> bool:
        if self._in_order and self._num_busy:
            return False
        return bool(self._running or self._cancelled or (self._due and self._num_free))

    @property
    def is_waiting(self) -> bool:
        """Return whether there are coroutines, but no pass is possible until one of them continues."""
        return self._num_live > 0 and not self._can_pass

    def _make_pass(self, pauses: bool = False) -> None:
        due = [] if pauses else list(self._due)
        if self._in_order:
            due.sort(key=lambda number: self._due[number].worker.number)
        due = due[: self._num_free]
        self._running |= {number: self._due.pop(number) for number in due}
        requests = [self._running[number].request for number in due]
        made = EnginePass(self._cancelled, requests, self._forgets, self._until_finished, pauses)
        self._cancelled, self._forgets = [], False
        are_valid = [self._take(completion) for completion in self._run_pass(made)]
        if self._running and not self._engine.num_in_flight and all(are_valid):
            missing = [each.request.name for each in self._running.values()]
            raise LostTrajectory(f"the engine returned no completion for {join_first(missing)}. {REMEDY}")
        self._end_pass_waits()
        self._report_tokens()

    def _end_pass_waits(self) -> None:
        waits, self._pass_waits = self._pass_waits, []
        for future, worker in waits:
            self._resolve(future, None, worker)

    def _take(self, completion: Completion) -> bool:
        """Resolve a request. Returns whether the completion is valid for training."""
        number = completion.request_id
        if number not in self._running:
            raise LostTrajectory(
                f"the engine answered request {number}, which was not made or had its answer. {REMEDY}"
            )
        each = self._running.pop(number)
        try:
            check_completion(each.request, completion)
        except RuntimeError as error:
            self._resolve(each.future, error, each.worker)
            return False
        self._resolve(each.future, completion, each.worker)
        return True

    def _report_tokens(self) -> None:
        """Report sampled tokens of the requests with ``on_tokens``. This uses at most a tenth of the time."""
        if (began := time.monotonic()) < self._next_tokens:
            return
        wanted = {number: each.on_tokens for number, each in self._running.items() if each.on_tokens is not None}
        if not wanted:
            return
        for number, tokens in self._engine.sampled_tokens(wanted.keys()).items():
            wanted[number](tokens)
        now = time.monotonic()
        self._next_tokens = now + max(_TOKENS_S, 10 * (now - began))

    # ------------------------------------------------------------------------------------------ coroutines
    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine that may call ``sample``. ``join`` waits for its task."""
        worker = _Worker(self._num_begun)
        self._num_begun += 1
        self._num_live += 1
        self._num_busy += 1

        async def work() -> T:
            _CURRENT.set(worker)
            return await coroutine

        def end_worker(_: asyncio.Task[T]) -> None:
            coroutine.close()  # in case it was cancelled before it started
            self._num_live -= 1
            self._num_busy -= 1
            self._changed.set()

        task = asyncio.ensure_future(work())
        task.add_done_callback(end_worker)
        return task

    async def join(self, tasks: Sequence[asyncio.Task[T]]) -> list[T]:
        """Wait for tasks of ``begin`` and return their results, in order. The first error is raised, and cancels the other tasks."""
        try:
            if waiting := [task for task in tasks if not task.done()]:
                joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                worker, left = _CURRENT.get(), len(waiting)

                def count_down(task: asyncio.Task[T]) -> None:
                    nonlocal left
                    left -= 1
                    if not left or task.cancelled() or task.exception() is not None:
                        self._resolve(joined, None, worker)

                for task in waiting:
                    task.add_done_callback(count_down)
                await self._wait(joined, worker)
            failed = [task for task in tasks if task.done() and (task.cancelled() or task.exception() is not None)]
            return [task.result() for task in failed or tasks]
        finally:
            await cancel_all(tasks)

    async def sample(self, request: Request, on_tokens: OnTokens | None = None, num_cached: int = 0) -> Completion:
        """Return the engine's completion of a request. If the caller is cancelled, the next pass cancels the request.

        The request gets an id of this loop. ``on_tokens`` receives the tokens so far, several times a second. ``num_cached``: number
        of tokens before the response that this engine has probably cached. Requests with few are moved to other engines first.

        Raises:
            RuntimeError: the response is not valid for training.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        number, worker = next(self._numbers), _CURRENT.get()
        self._due[number] = _Open(replace(request, request_id=number), future, worker, on_tokens, num_cached)
        self._changed.set()
        try:
            return await self._wait(future, worker)
        except asyncio.CancelledError:
            if self._running.pop(number, None) is not None:
                self._cancelled.append(number)
                self._changed.set()
            self._due.pop(number, None)
            self._moved.pop(number, None)
            raise

    async def next_pass(self) -> None:
        """Wait until the engine has run one pass, or all other coroutines have ended. At least one response finishes in a pass."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        worker = _CURRENT.get()
        self._pass_waits.append((future, worker))
        await self._wait(future, worker)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one of ``places`` during the block. Coroutines get places in their order, when no coroutine is busy."""
        if self._free_places is None:
            yield
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        worker = _CURRENT.get()
        heappush(self._place_waits, (worker.number, given, worker))
        try:
            await self._wait(given, worker)
            yield
        finally:
            if given.done() and not given.cancelled():  # it got the place, even if it was cancelled immediately after
                self._free_places += 1

    def _give_places(self) -> None:
        """Give free places to waiting coroutines. While a coroutine is busy, the number of free places depends on timing."""
        if self._num_busy:
            return
        while self._place_waits and self._free_places:
            _, given, worker = heappop(self._place_waits)
            if not given.done():  # else its coroutine was cancelled
                self._free_places -= 1
                self._resolve(given, None, worker)

    # ------------------------------------------------------------------------------------------ other engines
    def move_held(self, most: int) -> list[Request]:
        """Return at most ``most`` held requests, which another engine shall sample. ``resolve`` receives their completions."""
        held = list(self._due)[self._num_free :]
        moved = sorted(held, key=lambda number: self._due[number].num_cached)[:most]
        self._moved |= {number: self._due.pop(number) for number in moved}
        return [self._moved[number].request for number in moved]

    def resolve(self, number: int, completion: Completion) -> None:
        """Receive the completion of a moved request. Drop it if its request was cancelled."""
        if (each := self._moved.pop(number, None)) is not None:
            self._resolve(each.future, completion, each.worker)

    # ------------------------------------------------------------------------------------------ waiting
    async def _wait(self, future: asyncio.Future[T], worker: _Worker) -> T:
        """Wait for a future that ``_resolve`` resolves. The worker is not busy during the wait."""
        worker.num_waits += 1
        if worker.num_waits == 1:
            self._num_busy -= 1
            self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():  # the waiting task cancelled it, so ``_resolve`` did not run
                self._wake(worker)
            raise

    def _resolve(self, future: asyncio.Future[T], result: T | Exception, worker: _Worker) -> None:
        """Resolve a future, unless its task was cancelled. The worker is busy immediately, before its task continues."""
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        self._wake(worker)

    def _wake(self, worker: _Worker) -> None:
        worker.num_waits -= 1
        if not worker.num_waits:
            self._num_busy += 1


def check_completion(request: Request, completion: Completion) -> None:
    """Reject a completion that is not valid for training.

    Raises:
        RuntimeError: there is no token, the numbers of logprobs and tokens differ, or the request is unfinished. Also if a logprob
            is NaN, infinite or positive, if a requested route is missing, or if a requested support is missing or does not contain
            its token. The message names the prompt.
    """
    tokens, logprobs, where = completion.token_ids, completion.logprobs, request.name
    if not len(tokens):
        raise RuntimeError(f"the engine returned no token for {where}")
    if len(logprobs) != len(tokens):
        raise RuntimeError(f"the engine returned {len(logprobs)} logprobs for {len(tokens)} tokens ({where})")
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > MAX_LOGPROB))
    if len(wrong):
        raise RuntimeError(f"the engine returned logprob {logprobs[wrong[0]]} at token {wrong[0]} of {where}")
    if request.sampling.records_support:
        _check_support(completion, where)
    if request.sampling.records_routes:
        routes = completion.fields.get(ROUTES)
        if not isinstance(routes, np.ndarray) or not routes[-len(tokens) :].all():
            raise RuntimeError(f"the engine did not record the experts that all tokens of {where} went to")
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine gave up with finish_reason={completion.finish_reason!r} for {where}")


def _check_support(completion: Completion, where: str) -> None:
    support, tokens = completion.support, completion.token_ids
    if support is None or len(support.counts) != len(tokens):
        count = "none" if support is None else f"those of {len(support.counts)} tokens"
        raise RuntimeError(
            f"the engine did not record the tokens that top_p and top_k kept: {count} for {len(tokens)} tokens "
            f"({where}); set rollout.sampling.top_p=1 and top_k=-1"
        )
    is_own = support.values == tokens.repeat(support.counts)
    owners = np.arange(len(tokens)).repeat(support.counts)
    lacking = np.flatnonzero(np.bincount(owners[is_own], minlength=len(tokens)) != 1)
    if len(lacking):
        raise RuntimeError(f"the engine recorded a support without the sampled token, at token {lacking[0]} of {where}")
