"""Agent episodes in progress: the turns that agents request from the policy, and the results of the episodes."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from rlhf_mcore.config.errors import ConfigError, printable
from rlhf_mcore.environments.agents.calls import NO_PARSER, Call, RequestError, TurnInput, TurnOutput
from rlhf_mcore.environments.agents.conversation import STRAY, Continuation, Conversation, comparable, num_characters
from rlhf_mcore.environments.agents.endpoint import Endpoint
from rlhf_mcore.environments.agents.program import NO_TURN, missing_reward
from rlhf_mcore.environments.agents.tree import TokenTree
from rlhf_mcore.environments.control_tokens import most_characters
from rlhf_mcore.environments.episodes import PART, row_of
from rlhf_mcore.environments.generator import TURNS
from rlhf_mcore.environments.sessions import Sessions, StepResult
from rlhf_mcore.sampling.checks import check_completion
from rlhf_mcore.sampling.episode_log import EpisodeLog, node_texts
from rlhf_mcore.sampling.policy import Limits
from rlhf_mcore.sampling.requests import request_of
from rlhf_mcore.sampling.seeds import request_seed, turn_seed
from rlhf_mcore.types import Completion, EpisodeRequest, Job, Ragged, Recorded, Request, Score

_WORDS_S = 0.05  # interval between text events of a stream
_PLACES_S = 0.05  # maximum wait of an engine for the places of new requests. Slower ones are found while it samples.
Drawn = Callable[[Collection[int]], Mapping[int, Sequence[int]]]
_TOO_LONG = "context_length_exceeded"
_LIMITS = {"turns": "environment.max_turns", "length": "environment.max_tokens", "seconds": "environment.max_seconds"}


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn of the episode ``key`` that is being sampled.

    ``call`` is None for the turn of an agent that failed before its first request. The turn is sampled because a trajectory needs one.
    """

    key: int
    request: Request
    tree: TokenTree
    place: Continuation
    call: Call | None
    number: int = 0  # index among the turns of the call
    heard: str = ""  # text already sent to the client


@dataclass(slots=True, eq=False)
class _AgentEpisode:
    asked: EpisodeRequest
    started: float
    tree: TokenTree = field(default_factory=TokenTree)
    log: EpisodeLog = field(default_factory=EpisodeLog)
    num_turns: int = 0  # requested turns
    limit: str = ""  # key of _LIMITS if the episode reached a limit
    failure: StepResult | None = None  # failure of an agent that requested no turn


_Waiting = tuple[_AgentEpisode, Call]  # a call whose place in the tree is not found yet


@dataclass(frozen=True, slots=True)
class AgentRules:
    """Rules for the episodes of agents. ``max_total``: maximum tokens per sequence, including its first prompt.

    ``fails``: whether an agent without a result ends the run. ``needs_reward``: whether the agent must return the score.
    """

    limits: Limits
    max_total: int
    fails: bool = True
    needs_reward: bool = True
    branches: str = "all"  # the branches to train on: all, last or longest


class AgentEpisodes:
    """The episodes of an engine, on its lead rank: an :class:`rlhf_mcore.episode_driver.EpisodeDriver`.

    An agent is a session with a single step, which is the whole episode. During this step it requests turns from the endpoint,
    concurrently if it wants. The engine samples the turns that are due, so the batch composition depends on timing.
    """

    def __init__(self, sessions: Sessions, endpoint: Endpoint, talk: Conversation, rules: AgentRules) -> None:
        self._sessions, self._endpoint, self._talk, self._rules = sessions, endpoint, talk, rules
        sessions.wake = endpoint.wake
        self._open: dict[int, _AgentEpisode] = {}
        self._turns: dict[int, _Turn] = {}
        self._next = 1  # number of the next turn
        self._requests: list[Request] = []
        self._finished: list[Completion] = []
        self._drawn: Drawn | None = None
        self._slots: int | None = None
        self._at_engine: set[int] = set()  # turns in the engine, including turns whose client has disconnected
        self._next_words = 0.0  # time of the next text events of streams
        self._finder = ThreadPoolExecutor(1, "places")  # renders and tokenises requests
        self._unplaced: list[_Waiting] = []
        self._finding: tuple[list[_Waiting], Future[list[Continuation | str]]] | None = None

    def watch(self, drawn: Drawn, slots: int | None = None) -> None:
        """See :class:`rlhf_mcore.episode_driver.EpisodeDriver`."""
        self._drawn, self._slots = drawn, slots

    def abandoned_turns(self) -> Collection[int]:
        """Return turns whose client disconnected or whose episode ended (:class:`rlhf_mcore.episode_driver.EpisodeDriver`)."""
        gone = {
            number
            for number in self._at_engine
            if (turn := self._turns.get(number)) is None or (turn.call is not None and turn.call.gone)
        }
        self._at_engine -= gone
        for number in gone:
            self._turns.pop(number, None)
        return sorted(gone)

    @property
    def num_held(self) -> int:
        """Return the number of turns that are held back."""
        return len(self._requests)

    def lend(self, most: int) -> list[Request]:
        """Remove and return at most ``most`` held turns, for other engines.

        The turns with the shortest prefix in this engine are returned first, because another engine computes the prefix again.
        """
        places = {request.request_id: self._turns[request.request_id].place for request in self._requests}
        begun = {number: place.parent is not None and len(place.tokens()) for number, place in places.items()}
        given = sorted(self._requests, key=lambda request: begun[request.request_id])[:most]
        gone = {request.request_id for request in given}
        self._requests = [request for request in self._requests if request.request_id not in gone]
        return given

    @property
    def num_open(self) -> int:
        """Return the number of episodes that ``take`` has not returned yet."""
        return len(self._open) + len(self._finished)

    @property
    def num_waiting(self) -> int:
        """Return the number of episodes that wait for their agent."""
        return self._sessions.num_calls

    def begin(self, requests: Sequence[Request]) -> list[Request]:
        """Start an agent for each episode request. Returns the other requests, which are single turns."""
        for request in requests:
            if isinstance(request, EpisodeRequest):
                self._open[request.request_id] = _AgentEpisode(request, time.monotonic())
                prompt, seed = request.prompt, request.sampling.seed
                task_seed = request_seed(seed, request.step, prompt.index, -1 - prompt.occurrence)
                messages, images = self._talk.messages_of(prompt), self._talk.images
                row = {**row_of(prompt), "messages": messages, "seed": task_seed}
                if images is not None and prompt.images:
                    row |= images.task(prompt, messages)
                self._sessions.open(request.request_id, row, task_seed)
        return [request for request in requests if not isinstance(request, EpisodeRequest)]

    def cancel(self, request_ids: Collection[int]) -> None:
        """Drop these episodes. Unknown ids are ignored. ``abandoned_turns`` then returns their turns."""
        for key in self._open.keys() & set(request_ids):
            self._close(key)
        self._finished = [each for each in self._finished if each.request_id not in request_ids]

    def abandon(self) -> None:
        """Drop all episodes."""
        self.cancel(list(self._open))

    def due(self, engine_draws: bool, wait_s: float | None) -> list[Request] | None:
        """Return the turns to sample (:class:`rlhf_mcore.episode_driver.EpisodeDriver`).

        Raises:
            ConfigError: an agent gave no result, and ``fails`` is set.
        """
        self._poll(0.0)
        self._take_calls()
        if engine_draws and time.monotonic() >= self._next_words:
            self._say_words()
        if not (engine_draws or self._requests or self._finished):
            self._poll(wait_s)
            self._take_calls()
            if not self._requests:
                return None
        room = len(self._requests) if self._slots is None else max(self._slots - len(self._at_engine), 0)
        requests, self._requests = self._requests[:room], self._requests[room:]
        self._at_engine.update(request.request_id for request in requests)
        return requests

    def take(self, completions: Iterable[Completion]) -> list[Completion]:
        """Send sampled turns to their clients. Returns the episodes that ended, and completions of other requests.

        Raises:
            RuntimeError: a turn is not valid for training.
        """
        others = []
        for completion in completions:
            self._at_engine.discard(completion.request_id)
            turn = self._turns.pop(completion.request_id, None)
            if turn is not None:
                check_completion(turn.request, completion)
                self._take_turn(turn, completion)
            elif completion.request_id < TURNS // 2:  # ids of episodes may be below 0
                others.append(completion)  # all other completions are abandoned turns
        finished, self._finished = self._finished, []
        return others + finished

    # ----------------------------------------------------------------------------------------------------------- agents
    def _poll(self, timeout_s: float | None) -> None:
        for key, answer in self._sessions.poll(timeout_s):
            each = self._open[key]
            try:
                self._take_answer(key, each, answer)
            except ConfigError:
                raise
            except Exception as error:
                self._fail(key, each, StepResult(error=f"failed in the trainer ({type(error).__name__}: {error})"))

    def _take_answer(self, key: int, each: _AgentEpisode, answer: StepResult) -> None:
        if answer.error:
            self._fail(key, each, answer)
        elif not answer.done:
            self._sessions.step(key, {"base_url": self._endpoint.url, "api_key": self._endpoint.open(key)})
        elif not each.tree.nodes:
            self._fail(key, each, StepResult(error=NO_TURN))
        elif self._rules.needs_reward and not each.limit and (missing := missing_reward(answer.messages)):
            self._fail(key, each, StepResult(error=missing))
        else:
            self._finish(key, each.limit or "stop", Score(answer.reward, {PART: answer.reward}))

    def _fail(self, key: int, each: _AgentEpisode, answer: StepResult) -> None:
        """End an episode whose agent gave no result. If the episode reached a limit, the limit is the cause, and the score is 0.

        Raises:
            ConfigError: ``fails`` is set.
        """
        if each.limit and each.tree.nodes:
            self._finish(key, each.limit, Score(0.0, {PART: 0.0}))
            return
        count = len(each.tree.nodes)
        cause = f"{self._sessions.name} on {each.asked.name}, after {count} turn{'s' * (count != 1)}, {answer.error}"
        if self._rules.fails:
            raise ConfigError(f"{cause}. Correct it, or set reward.on_error=zero to score such an episode 0")
        self._endpoint.close(key)
        if not each.tree.nodes:  # a trajectory needs at least one turn of the policy
            each.failure = answer
            prompt = each.asked.prompt
            self._ask(key, each, Continuation(None, prompt.text, list(prompt.prompt_ids), images=prompt.images), None)
            return
        kind = "timeout" if answer.timed_out else "error"
        self._finish(key, "environment", Score(0.0, failure=kind, cause=cause))

    def _close(self, key: int) -> _AgentEpisode:
        each = self._open.pop(key)
        self._endpoint.close(key)
        self._sessions.close(key)
        self._drop_turns(each.tree)
        return each

    def _drop_turns(self, tree: TokenTree) -> None:
        dropped = {number for number, turn in self._turns.items() if turn.tree is tree}
        self._turns = {number: turn for number, turn in self._turns.items() if number not in dropped}
        self._requests = [request for request in self._requests if request.request_id not in dropped]

    def _finish(self, key: int, reason: str, score: Score) -> None:
        each = self._open[key]
        drawn = each.tree.trajectory(each.asked.prompt, each.asked.sample, self._rules.branches)
        last = each.tree.nodes[-1].turn
        text = str(self._talk.tokenizer.decode(last.token_ids.tolist(), skip_special_tokens=True))
        whole = replace(drawn, response_text=text, finish_reason=reason, score=score, record=_record(each))
        self._close(key)
        self._finished.append(replace(last, request_id=key, trajectory=whole))

    # ------------------------------------------------------------------------------------------------------------ turns
    @contextmanager
    def _contained(self, call: Call) -> Iterator[None]:
        """Answer a call with an error if its processing raises. The episode and the run continue."""
        try:
            yield
        except Exception as error:
            reason = f"the request failed in the trainer ({type(error).__name__}: {printable(str(error))[:200]})"
            call.answer(RequestError(500, reason, "internal_error"))

    def _take_calls(self) -> None:
        """Receive requests of agents, and create turns for the requests whose places are found."""
        for call in self._endpoint.take():
            each = self._open.get(call.key)
            if each is None:
                call.answer(RequestError(410, "the episode has ended"))
            elif call.asked is None:  # the agent starts over
                self._drop_turns(each.tree)
                self._open[call.key] = _AgentEpisode(each.asked, each.started)
            elif not call.gone:
                with self._contained(call):
                    self._take_call(each, call, call.asked)
        self._place_calls()
        if self._finding is None and (waiting := [each for each in self._unplaced if self._is_current(*each)]):
            requests = [(each.tree, call.asked) for each, call in waiting if call.asked is not None]
            self._finding = waiting, self._finder.submit(self._talk.find, requests)
            wait([self._finding[1]], _PLACES_S)
            self._finding[1].add_done_callback(self._wake)
            self._unplaced = []
            self._place_calls()

    def _take_call(self, each: _AgentEpisode, call: Call, asked: TurnInput) -> None:
        if asked.tools and self._talk.parse is None:
            call.answer(RequestError(400, NO_PARSER))
        elif (size := num_characters(asked)) > (most := most_characters(self._rules.max_total)):
            each.limit = "length"
            reason = f"the request has {size:,} characters, more than the limit of {most:,}, so its tokens cannot fit"
            call.answer(RequestError(400, reason, _TOO_LONG))
        else:
            each.log.answer_calls(answered_calls(asked), call.asked_at)
            self._unplaced.append((each, call))

    def _is_current(self, each: _AgentEpisode, call: Call) -> bool:
        """Return whether the client of a call still waits, and its agent did not start over."""
        return self._open.get(call.key) is each and not call.gone

    def _wake(self, found: object) -> None:
        if self._sessions.wake:
            with suppress(OSError):  # it is already readable, or the run ended
                os.eventfd_write(self._sessions.wake, 1)

    def _place_calls(self) -> None:
        """Create turns at the places that were found."""
        if self._finding is None or not self._finding[1].done():
            return
        (waiting, found), self._finding = self._finding, None
        places = found.result() if found.exception() is None else [str(found.exception())] * len(waiting)
        for (each, call), place in zip(waiting, places, strict=True):
            if not self._is_current(each, call):
                continue
            with self._contained(call):
                if isinstance(place, str):
                    call.answer(RequestError(400, place))
                elif refusal := self._refuse(each, place, call.n):
                    call.answer(refusal)
                else:
                    for _ in range(call.n):
                        self._ask(call.key, each, place, call)

    def _refuse(self, each: _AgentEpisode, place: Continuation, num_turns: int) -> RequestError | None:
        limits = self._rules.limits
        if place.is_confused:
            each.limit = "length"
            return RequestError(400, STRAY, "limit")
        if each.num_turns + num_turns > limits.max_turns:
            each.limit = "turns"
        elif limits.max_seconds is not None and time.monotonic() - each.started >= limits.max_seconds:
            each.limit = "seconds"
        elif self._room(place) < 1:
            each.limit = "length"
        else:
            return None
        code = _TOO_LONG if each.limit == "length" else "limit"
        return RequestError(400, f"the episode has reached {_LIMITS[each.limit]}", code)

    def _room(self, place: Continuation) -> int:
        """Return the maximum number of tokens of a turn.

        ``max_total`` limits the whole sequence, and ``limits.max_tokens`` limits its tokens after its first prompt.
        """
        num_tokens, first = len(place.tokens()), len(place.context)
        if place.parent is not None:
            first = len(place.parent.path()[0].context)
        most = self._rules.max_total
        if self._rules.limits.max_tokens is not None:
            most = min(most, first + self._rules.limits.max_tokens)
        return most - num_tokens

    def _ask(self, key: int, each: _AgentEpisode, place: Continuation, call: Call | None) -> None:
        asked, number = each.asked, self._next * TURNS + key
        first = request_of(Job(number, asked.prompt, asked.sample, asked.sampling, asked.step))
        name = f"{first.name}, turn {each.num_turns}"
        seed = turn_seed(first.seed, each.num_turns) if each.num_turns else first.seed
        limits = [asked.sampling.max_new_tokens, self._room(place), call.max_tokens if call is not None else None]
        most = max(min(limit for limit in limits if limit is not None), 1)
        sampling = replace(asked.sampling, max_new_tokens=most)
        request = replace(first, name=name, prompt_ids=place.tokens(), seed=seed, sampling=sampling)
        request = replace(request, images=place.seen())
        self._turns[number] = _Turn(key, request, each.tree, place, call, len(call.turns) if call is not None else 0)
        each.log.begin_turn(number, call.asked_at if call is not None else None)
        if call is not None:
            call.turns[number] = None
        self._requests.append(request)
        self._next, each.num_turns = self._next + 1, each.num_turns + 1

    def _say_words(self) -> None:
        """Send clients of streams the text that was sampled since the last call. This uses at most a tenth of the time."""
        began = time.monotonic()
        streams = {
            number: turn
            for number, turn in self._turns.items()
            if turn.call is not None and turn.call.hear is not None and not turn.call.gone
        }
        if streams and self._drawn is not None:
            for number, ids in self._drawn(streams.keys()).items():
                turn = streams[number]
                assert turn.call is not None and turn.call.hear is not None and turn.call.asked is not None
                if words := self._talk.words_of(ids, turn.call.asked, turn.call.stop).removeprefix(turn.heard):
                    turn.heard += words
                    turn.call.hear(turn.number, words)
        now = time.monotonic()
        self._next_words = now + max(_WORDS_S, 10 * (now - began))

    def _take_turn(self, turn: _Turn, drawn: Completion) -> None:
        """Store a sampled turn. When all turns of its call are sampled, add them to the tree and answer the call.

        If the client disconnected, the turns are not added, so the policy does not learn from them.
        """
        call, place, each = turn.call, turn.place, self._open[turn.key]
        each.log.end_turn(turn.request.request_id)
        if call is None:
            assert each.failure is not None
            said, end, _ = self._talk.read(drawn, ())
            node = each.tree.add(None, place.text, place.context, drawn, said, end, images=place.images)
            each.log.add_node(node.place, drawn.request_id)
            self._fail(turn.key, each, each.failure)
            return
        call.turns[drawn.request_id] = drawn
        if call.gone or None in call.turns.values():
            return
        with self._contained(call):
            # Read all turns before the first is added. If reading fails, the client gets an error, and no turn is trained on.
            read = [self._read(turn, call.turns[number]) for number in sorted(call.turns)]
            for cut, said, end, answer in read:
                more: dict[str, Any] = {"reply": comparable(answer.message), "num_messages": place.num_messages}
                more |= {"shown": place.shown, "images": place.images}
                node = each.tree.add(place.parent, place.text, place.context, cut, said, end, **more)
                each.log.add_node(node.place, cut.request_id, answer.calls)
            call.answer([answer for *_, answer in read])

    def _read(self, turn: _Turn, drawn: Completion) -> tuple[Completion, str, str, TurnOutput]:
        """Return the kept part of a completion, its text, the text of its end token, and the turn for the client."""
        assert turn.call is not None and turn.call.asked is not None
        place, tools = turn.place, turn.call.asked.tools
        cut, stop = self._cut(drawn, turn.call.stop)
        said, end, message = self._talk.read(cut, tools)
        if stop is not None:
            message = {**message, "content": message["content"].partition(stop)[0]}
        # Parsers number the calls of each turn from 0. Ids must be unique in the episode.
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "id": f"call_{secrets.token_hex(8)}"} for call in calls]}
        decode = self._talk.tokenizer.decode
        tokens = [
            (str(decode([token])), float(value))
            for token, value in zip(cut.token_ids.tolist(), cut.logprobs, strict=True)
        ]
        reason = "stop" if stop is not None else cut.finish_reason
        return cut, said, end, TurnOutput(message, tokens, reason, len(place.tokens()), stop)

    def _cut(self, drawn: Completion, stops: Sequence[str]) -> tuple[Completion, str | None]:
        """Cut a turn after the first token that completes one of the ``stops``. Returns also this stop text, or None."""
        decode, ids = self._talk.tokenizer.decode, drawn.token_ids.tolist()
        text = str(decode(ids, skip_special_tokens=True))
        if not any(stop in text for stop in stops):
            return drawn, None
        for count in range(1, len(ids) + 1):
            begun = str(decode(ids[:count], skip_special_tokens=True))
            there = [stop for stop in stops if stop in begun]
            if there:
                return cut_turn(drawn, count), min(there, key=begun.index)
        raise AssertionError("its text has it")


def answered_calls(asked: TurnInput) -> list[str]:
    """Return the ids of the tool calls whose results are the last messages of a request."""
    results = takewhile(lambda message: message["role"] not in ("assistant", "system"), reversed(asked.messages))
    return [message["tool_call_id"] for message in results if message.get("tool_call_id")]


def _record(each: _AgentEpisode) -> dict[str, Any]:
    """Return the record of an episode as JSON values: its turns with their parents, texts and times."""
    nodes = [
        {
            "parent": node.parent.place if node.parent is not None else None,
            **node_texts(node.shown, node.said, len(node.context), node.turn),
            **each.log.node_record(node.place),
        }
        for node in each.tree.nodes
    ]
    return {**each.log.summary(), "nodes": nodes}


def cut_turn(drawn: Completion, count: int) -> Completion:
    """Return the first ``count`` tokens of a turn, with all values recorded for them."""
    dropped = len(drawn.token_ids) - count

    def cut(values: Recorded) -> Recorded:
        if isinstance(values, Ragged):
            counts = values.counts[:count]
            return Ragged(counts, values.values[: int(np.sum(counts))])
        return values[: len(values) - dropped]  # may also contain values of tokens before the turn

    support = cut(drawn.support) if drawn.support is not None else None
    assert support is None or isinstance(support, Ragged)
    return replace(
        drawn,
        token_ids=drawn.token_ids[:count],
        logprobs=drawn.logprobs[:count],
        versions=tuple((first, version) for first, version in drawn.versions if first < count),
        finish_reason=drawn.finish_reason if count == len(drawn.token_ids) else "length",
        support=support,
        fields={name: cut(values) for name, values in drawn.fields.items()},
    )
