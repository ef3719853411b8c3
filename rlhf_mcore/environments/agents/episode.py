"""Run an agent's episode: the turns that the agent requests from the policy, and the result of the episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.coroutines import cancel_all
from rlhf_mcore.environments.agents.conversation import STRAY, Continuation, Conversation, comparable, num_characters
from rlhf_mcore.environments.agents.dialects import NO_PARSER, RequestError, TurnInput, TurnOutput
from rlhf_mcore.environments.agents.endpoint import ENDED, Endpoint
from rlhf_mcore.environments.agents.program import NO_TURN, missing_reward
from rlhf_mcore.environments.agents.tree import TokenTree, cut_at_stop, tree_record
from rlhf_mcore.environments.environment import PART, row_of
from rlhf_mcore.environments.sessions import Session, Sessions, StepResult
from rlhf_mcore.environments.turn_text import most_characters
from rlhf_mcore.types import Completion, Prompt, Score, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.environments.agents.dialects import ClientRequest
    from rlhf_mcore.environments.agents.endpoint import OnText
    from rlhf_mcore.sampling.rollouts import Context, Policy, RolloutLimits

T = TypeVar("T")
_PLACES_S = 0.05  # maximum wait of an engine for the places of new requests. Slower ones are found while it samples.
_TOO_LONG = "context_length_exceeded"
_LIMITS = {"turns": "environment.max_turns", "length": "environment.max_tokens", "seconds": "environment.max_seconds"}


class PlaceFinder:
    """Finds the places of requests in their trees. Requests that arrive together share a process for the chat template."""

    def __init__(self, talk: Conversation) -> None:
        self._talk, self._thread = talk, ThreadPoolExecutor(1, "places")  # renders and tokenises requests
        self._waiting: list[tuple[TokenTree, TurnInput, asyncio.Future[Continuation | str]]] = []
        self._work: asyncio.Task[None] | None = None

    async def find(self, tree: TokenTree, asked: TurnInput) -> Continuation:
        """Return the place of a request.

        Raises:
            RequestError: the request is rejected.
        """
        future: asyncio.Future[Continuation | str] = asyncio.get_running_loop().create_future()
        self._waiting.append((tree, asked, future))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._find_all())
        place = await future
        if isinstance(place, str):
            raise RequestError(400, place)
        return place

    async def _find_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            current = [(tree, asked, future) for tree, asked, future in waiting if not future.done()]
            found = self._thread.submit(self._talk.find, [(tree, asked) for tree, asked, _ in current])
            wait([found], _PLACES_S)
            try:
                places = await asyncio.wrap_future(found)
            except Exception as error:
                places = [str(error)] * len(current)
            for (_, _, future), place in zip(current, places, strict=True):
                if not future.done():
                    future.set_result(place)


@dataclass(frozen=True, slots=True)
class AgentRules:
    """Rules for the episodes of agents.

    ``fails``: whether an agent without a result ends the run. ``needs_reward``: whether the agent must return the score.
    ``in_order``: reject concurrent requests of an episode, because their order depends on timing.
    """

    fails: bool = True
    needs_reward: bool = True
    branches: str = "all"  # the branches to train on: all, last or longest
    in_order: bool = False


class AgentRollout:
    """Runs episodes of agents: a :data:`rlhf_mcore.sampling.rollouts.RolloutFunction`.

    An agent is a session with a single step, which is the whole episode. During this step it requests turns from the endpoint,
    concurrently if it wants.
    """

    def __init__(self, sessions: Sessions, endpoint: Endpoint, talk: Conversation, rules: AgentRules) -> None:
        self._sessions, self._endpoint, self._talk, self._rules = sessions, endpoint, talk, rules
        self._places = PlaceFinder(talk)

    async def __call__(self, policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
        """Run an episode.

        Raises:
            ConfigError: the agent gave no result, and ``rules.fails`` is set. Or it sent concurrent requests, and ``rules.in_order``
                is set.
            RuntimeError: a turn is not valid for training.
        """
        messages, images = self._talk.messages_of(prompt), self._talk.images
        row = {**row_of(prompt), "messages": messages, "seed": ctx.seed}
        if images is not None and prompt.images:
            row |= images.task(prompt, messages)
        each = AgentEpisode(policy, self._talk, self._places, ctx.limits, self._rules.in_order)
        session = self._sessions.open(row, ctx.seed)
        try:
            answer = await each.run_until_failure(self._play(session, each))
            return await self._end(each, answer, ctx)
        finally:
            session.close()

    async def _play(self, session: Session, each: AgentEpisode) -> StepResult:
        """Run the agent, and serve its requests. Returns its last answer."""
        answer = await session.reset()
        api_key = self._endpoint.open(each)
        try:
            while not (answer.error or answer.done):
                answer = await session.step({"base_url": self._endpoint.url, "api_key": api_key})
            return answer
        finally:
            self._endpoint.close(api_key)
            await each.close()

    async def _end(self, each: AgentEpisode, answer: StepResult, ctx: Context) -> Trajectory:
        """Return the trajectory of an episode whose agent gave its last answer.

        If an episode without a result has reached a limit, the limit is the cause, and the score is 0.
        """
        if answer.error:
            problem = answer.error
        elif not each.tree.nodes:
            problem = NO_TURN
        else:
            problem = missing_reward(answer.messages) if self._rules.needs_reward and not each.limit else ""
        if not problem:
            try:
                return self._trajectory(each, ctx, each.limit or "stop", Score(answer.reward, {PART: answer.reward}))
            except Exception as error:
                problem = f"failed in the trainer ({type(error).__name__}: {error})"
        count = len(each.tree.nodes)
        if each.limit and count:
            return self._trajectory(each, ctx, each.limit, Score(0.0, {PART: 0.0}))
        cause = f"{self._sessions.name} on {ctx.job.name}, after {count} turn{'s' * (count != 1)}, {problem}"
        if self._rules.fails:
            raise ConfigError(f"{cause}. Correct it, or set reward.on_error=zero to score such an episode 0")
        if not count:  # a trajectory needs at least one turn of the policy
            await each.sample_first(ctx.job.prompt)
        kind = "timeout" if answer.timed_out else "error"
        return self._trajectory(each, ctx, "environment", Score(0.0, failure=kind, cause=cause))

    def _trajectory(self, each: AgentEpisode, ctx: Context, reason: str, score: Score) -> Trajectory:
        drawn = each.tree.trajectory(ctx.job.prompt, ctx.job.sample, self._rules.branches)
        last = each.tree.nodes[-1].turn
        text = str(self._talk.tokenizer.decode(last.token_ids.tolist(), skip_special_tokens=True))
        return replace(
            drawn, response_text=text, finish_reason=reason, score=score, record=tree_record(each.tree, each.policy.log)
        )


class AgentEpisode:
    """The turns that an agent requests in one episode. Its methods run on the engine's event loop.

    ``limit`` is the key of ``_LIMITS`` that the episode has reached, or "".
    """

    def __init__(
        self, policy: Policy, talk: Conversation, places: PlaceFinder, limits: RolloutLimits, in_order: bool
    ) -> None:
        self.policy, self._talk, self._places, self._limits = policy, talk, places, limits
        self._in_order = in_order
        self.tree, self.limit = TokenTree(), ""
        self._context = copy_context()  # context of the rollout
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._is_closed = False

    async def run_until_failure(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, but raise the error of a turn at once."""
        task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait([task, self._failed], return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return task.result()
        finally:
            await cancel_all([task])

    # ------------------------------------------------------------------------------------------ for the endpoint
    async def ask(self, order: ClientRequest, asked_at: float, on_text: OnText | None = None) -> list[TurnOutput]:
        """Sample the turns of a request. If the caller is cancelled, the policy does not learn from them.

        ``asked_at``: ``time.monotonic`` of the request. ``on_text`` receives the number of a turn and its next text.

        Raises:
            RequestError: the request is rejected, or the episode has ended.
        """
        if self._is_closed:
            raise RequestError(410, ENDED)
        if self._in_order and self._tasks:
            error = ConfigError(
                "an agent sent concurrent requests, whose order depends on timing. Let it wait for each answer, or set "
                "environment.overlap=true, which makes equal runs differ in the last bits"
            )
            self._fail(error)
            raise RequestError(400, str(error))
        parts = [
            self._start(self._answer(asked, order, asked_at, place * order.n, on_text))
            for place, asked in enumerate(order.asked)
        ]
        try:
            return [turn for part in parts for turn in await part]
        finally:
            await cancel_all(parts)

    async def restart(self) -> None:
        """Drop all turns, because the agent starts over."""
        await cancel_all(self._tasks)
        self.tree, self.limit = TokenTree(), ""
        self.policy.restart()

    async def close(self) -> None:
        """Reject the requests in progress and all later requests."""
        self._is_closed = True
        await cancel_all(self._tasks)

    def _fail(self, error: Exception) -> None:
        """End the rollout with an error."""
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # the rollout may have ended

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a part of a request as a part of the rollout."""
        task: asyncio.Task[T] = self._context.run(asyncio.ensure_future, coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(
        self, asked: TurnInput, order: ClientRequest, asked_at: float, first: int, on_text: OnText | None
    ) -> list[TurnOutput]:
        """Sample ``order.n`` turns. ``first`` is the number of the first one among the turns of the request."""
        if asked.tools and self._talk.parse is None:
            raise RequestError(400, NO_PARSER)
        most = self._limits.max_total
        if most is not None and (size := num_characters(asked)) > (most := most_characters(most)):
            self.limit = "length"
            reason = f"the request has {size:,} characters, more than the limit of {most:,}, so its tokens cannot fit"
            raise RequestError(400, reason, _TOO_LONG)
        policy = self.policy
        policy.log.answer_calls(answered_calls(asked), asked_at)
        place = await self._places.find(self.tree, asked)
        self._check_limits(place, order.n)
        numbers = range(policy.num_turns, policy.num_turns + order.n)
        listeners = [self._listener(asked, order, first + k, on_text) for k in range(order.n)]
        try:
            drawn = await self._sample(place, order.max_tokens, asked_at, listeners)
        except Exception as error:  # a turn is not valid for training
            self._fail(error)
            raise
        # Read all turns before the first is added. If reading fails, the client gets an error, and no turn is trained on.
        read = [self._read(asked, order, place, turn, number) for number, turn in zip(numbers, drawn, strict=True)]
        for number, (cut, said, end, answer) in zip(numbers, read, strict=True):
            more: dict[str, Any] = {"reply": comparable(answer.message), "num_messages": place.num_messages}
            more |= {"shown": place.shown, "images": place.images}
            node = self.tree.add(place.parent, place.text, place.context, cut, said, end, **more)
            policy.log.add_node(node.place, number, answer.calls)
        return [answer for *_, answer in read]

    def _listener(
        self, asked: TurnInput, order: ClientRequest, number: int, on_text: OnText | None
    ) -> Callable[[Sequence[int]], None] | None:
        """Return the function that sends the new text of a turn to its client; None if the client does not want it."""
        if on_text is None:
            return None
        sent = ""

        def send(tokens: Sequence[int]) -> None:
            nonlocal sent
            if text := self._talk.words_of(tokens, asked, order.stop).removeprefix(sent):
                sent += text
                on_text(number, text)

        return send

    def _check_limits(self, place: Continuation, num_turns: int) -> None:
        """Reject a request that would exceed a limit."""
        if place.is_confused:
            self.limit = "length"
            raise RequestError(400, STRAY, "limit")
        limit = self.policy.reached_limit(num_turns) or ("length" if self._room(place) < 1 else "")
        if limit:
            self.limit = limit
            code = _TOO_LONG if limit == "length" else "limit"
            raise RequestError(400, f"the episode has reached {_LIMITS[limit]}", code)

    def _room(self, place: Continuation) -> int:
        """Return the maximum number of tokens of a turn.

        ``max_total`` limits the whole sequence, and ``max_tokens`` limits its tokens after its first prompt.
        """
        first = len(place.context) if place.parent is None else len(place.parent.path()[0].context)
        most = self._limits.max_total
        assert most is not None, "agents have a limit"
        if self._limits.max_tokens is not None:
            most = min(most, first + self._limits.max_tokens)
        return most - len(place.tokens())

    async def sample_first(self, prompt: Prompt) -> None:
        """Sample a turn after the prompt, without a request."""
        place = Continuation(None, prompt.text, list(prompt.prompt_ids), images=prompt.images)
        number = self.policy.num_turns
        [turn] = await self._sample(place, None, None, [None])
        said, end, _ = self._talk.read(turn, ())
        node = self.tree.add(None, place.text, place.context, turn, said, end, images=place.images)
        self.policy.log.add_node(node.place, number)

    async def _sample(
        self,
        place: Continuation,
        max_tokens: int | None,
        asked_at: float | None,
        listeners: Sequence[Callable[[Sequence[int]], None] | None],
    ) -> list[Completion]:
        """Sample a turn for each listener."""
        room, tokens, images = self._room(place), place.tokens(), place.seen()
        most = max(room if max_tokens is None else min(room, max_tokens), 1)
        turns = [
            asyncio.ensure_future(
                self.policy.sample(tokens, max_tokens=most, images=images, asked_at=asked_at, on_tokens=listener)
            )
            for listener in listeners
        ]
        try:
            return list(await asyncio.gather(*turns))
        finally:
            await cancel_all(turns)

    def _read(
        self, asked: TurnInput, order: ClientRequest, place: Continuation, drawn: Completion, number: int
    ) -> tuple[Completion, str, str, TurnOutput]:
        """Return the kept part of a completion, its text, the text of its end token, and the turn for the client."""
        cut, stop = cut_at_stop(drawn, order.stop, self._talk.tokenizer)
        said, end, message = self._talk.read(cut, asked.tools)
        if stop is not None:
            message = {**message, "content": message["content"].partition(stop)[0]}
        # Parsers number the calls of each turn from 0. Ids must be unique in the episode, and equal in a repeated run, because
        # templates may write them.
        if calls := message.get("tool_calls"):
            prefix = f"call_{self.policy.seed_of(number):016x}"
            numbered = [{**call, "id": f"{prefix}{position}"} for position, call in enumerate(calls)]
            message = {**message, "tool_calls": numbered}
        decode = self._talk.tokenizer.decode
        tokens = [
            (str(decode([token])), float(value))
            for token, value in zip(cut.token_ids.tolist(), cut.logprobs, strict=True)
        ]
        reason = "stop" if stop is not None else cut.finish_reason
        return cut, said, end, TurnOutput(message, tokens, reason, len(place.tokens()), stop)


def answered_calls(asked: TurnInput) -> list[str]:
    """Return the ids of the tool calls whose results are the last messages of a request."""
    results = takewhile(lambda message: message["role"] not in ("assistant", "system"), reversed(asked.messages))
    return [message["tool_call_id"] for message in results if message.get("tool_call_id")]
