"""Run a rollout function (``rollout.function``) in a worker process, as an environment.

A step of this environment passes sampled turns to the function, and ends when the function waits for further turns or returns. If a
worker is lost, its functions are repeated in another process with the turns that were already sampled.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.environments.worker import EnvironmentFailed, Requests, messages_of_observation, sent_image
from rlhf_mcore.readers.user_functions import OwnFunction, load_function
from rlhf_mcore.rewards.user_function import number_problem, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    UserRollout = Callable[["FunctionPolicy", "FunctionPrompt", "FunctionContext"], Coroutine[Any, Any, Any]]

KEY = "rollout.function"
# Coroutines of a function that start together reach their requests within this number of passes of the event loop.
_PASSES = 32


class LimitReached(Exception):
    """The episode has reached a limit: "turns", "length" or "seconds". The policy samples no turn for this request."""


@dataclass(frozen=True, slots=True)
class FunctionTurn:
    """A sampled turn. ``text`` has no special tokens. ``finish_reason``: "stop", or "length" if a token limit ended the turn."""

    tokens: list[int]
    text: str
    logprobs: list[float]
    finish_reason: str

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens, as in ``rlhf_mcore.types.Completion``."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class FunctionPrompt:
    """A row of the data. ``row`` has its other columns. ``images`` are files, in the order of their tokens in ``tokens``."""

    tokens: list[int]
    messages: list[dict[str, Any]] | None
    answer: Any
    row: Mapping[str, Any]
    images: list[str]


@dataclass(frozen=True, slots=True)
class FunctionContext:
    """Helpers for a function. ``seed`` is equal for all rollouts of a prompt in a step; ``options`` is ``environment.options``."""

    seed: int
    options: Mapping[str, Any]
    _text: TurnText | None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the model."""
        assert self._text is not None
        return self._text.tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text. Names of special tokens in it are encoded as text."""
        assert self._text is not None
        return self._text.plain_tokens(text)

    def tokenize_messages(self, messages: Sequence[Mapping[str, Any]], after: FunctionTurn | None = None) -> list[int]:
        """Return the tokens of a conversation in the chat template, up to the start of the policy's next turn.

        ``after``: the last turn of the policy, which the messages follow. The result starts after its tokens.
        """
        assert self._text is not None
        checked = messages_of_observation(messages)
        if not checked:
            raise ValueError(f"{shorten(messages)} is not a list of messages with role and content")
        return self._text.conversation_tokens(checked) if after is None else self._text.after(after, checked)


class FunctionPolicy:
    """Samples turns."""

    LimitReached = LimitReached

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []  # requests that were not sent yet
        self.changed = asyncio.Event()
        self._waiting: list[asyncio.Future[FunctionTurn]] = []

    async def sample(
        self, tokens: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = (), images: Sequence[Any] = ()
    ) -> FunctionTurn:
        """Sample a turn after ``tokens``: the prompt, earlier turns and your own tokens.

        Args:
            max_tokens: limit of this turn, in addition to the limits of the run.
            stop: texts after which the turn ends. The turn's ``text`` contains the text that was found.
            images: the images of the tokens that follow the last known turn, as paths, URLs of data, or bytes.

        Raises:
            LimitReached: the episode has reached a limit. If you do not catch it, the episode ends.
            ValueError: the tokens or images cannot be used.
        """
        request: dict[str, Any] = {"tokens": [*map(index, tokens)], "images": [*map(sent_image, images)]}
        request["max_tokens"] = None if max_tokens is None else max(index(max_tokens), 1)
        request["stop"] = [stop] if isinstance(stop, str) else [*map(str, stop)]
        self.requests.append(request)
        self._waiting.append(asyncio.get_running_loop().create_future())
        self.changed.set()
        return await self._waiting[-1]

    def pop_requests(self) -> Requests:
        """Return the requests that were not sent yet."""
        requests, self.requests = Requests(self.requests), []
        return requests

    def take(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Resolve the first requests that have no answer yet: with a turn, a limit or an error."""
        futures, self._waiting = self._waiting[: len(answers)], self._waiting[len(answers) :]
        if len(futures) < len(answers):
            raise EnvironmentFailed("requested other turns when it was repeated; derive random numbers from ctx.seed")
        for future, answer in zip(futures, answers, strict=True):
            if future.done():  # the function cancelled it
                continue
            if "limit" in answer:
                future.set_exception(LimitReached(answer["limit"]))
            elif "error" in answer:
                future.set_exception(ValueError(answer["error"]))
            else:
                future.set_result(FunctionTurn(**answer))


class FunctionEnvironment:
    """An environment that runs a function.

    Args:
        function: ``path/to/file.py:name`` of ``async def f(policy, prompt, ctx)``.
        tokenizer: directory of the tokenizer; None: the function uses no tokens of texts.
        template, keep: as in ``TurnText``.
        options: ``environment.options``.

    Raises:
        ConfigError: the function or the tokenizer cannot be loaded.
    """

    def __init__(
        self, function: str, tokenizer: str | None, template: str, keep: bool, options: Mapping[str, Any] | None = None
    ) -> None:
        self._function, self._options, self._policy = load_rollout(function), options or {}, FunctionPolicy()
        self._text = None if tokenizer is None else _text_of(tokenizer, template, keep)
        self._task: asyncio.Task[Any] | None = None

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        """Start the function. It runs until its first request, which the first step returns."""
        tokens, messages, images = (row.pop(name) for name in ("tokens", "messages", "images"))
        prompt = FunctionPrompt(tokens, messages, row["ground_truth"], row, images)
        context = FunctionContext(seed, self._options, self._text)
        self._task = asyncio.ensure_future(self._run(prompt, context))
        self._task.add_done_callback(lambda _: self._policy.changed.set())

    async def step(self, answers: Sequence[Mapping[str, Any]]) -> tuple[Requests, float, bool]:
        """Continue the function until it waits for turns or ends. Returns its requests, or its result."""
        assert self._task is not None
        self._policy.take(answers)
        await self._policy.changed.wait()
        for _ in range(_PASSES):
            await asyncio.sleep(0)
        self._policy.changed.clear()
        if not self._task.done():
            return self._policy.pop_requests(), 0.0, False
        try:
            return Requests([read_result(self._task.result())]), 0.0, True
        except LimitReached as limit:
            return Requests([{"limit": str(limit)}]), 0.0, True

    def close(self) -> None:
        """Cancel the function."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, prompt: FunctionPrompt, context: FunctionContext) -> Any:
        try:
            return await self._function(self._policy, prompt, context)
        except SystemExit as error:  # it would end the event loop
            raise EnvironmentFailed(f"called sys.exit({error.code!r})") from error


def read_result(result: Any) -> dict[str, Any]:
    """Return ``{"reward", "parts"}`` for the result of a function. ``reward`` is None if it returned None.

    Raises:
        EnvironmentFailed: it returned neither None nor a finite number nor a dict with finite numbers.
    """
    if result is None:
        return {"reward": None, "parts": {}}
    entries = result if isinstance(result, Mapping) else {"reward": result}
    parts = entries.get("parts") or {}
    if "reward" not in entries or entries.keys() - {"reward", "parts"} or not isinstance(parts, Mapping):
        raise EnvironmentFailed(
            f'returned {shorten(result)}: return None, a number or {{"reward": ..., "parts": {{...}}}}'
        )
    values = {"the reward": entries["reward"], **{f"the part {name!r}": value for name, value in parts.items()}}
    if problem := next(filter(None, map(number_problem, values.values(), values)), None):
        raise EnvironmentFailed(f"returned {shorten(result)}: {problem}")
    return {"reward": float(entries["reward"]), "parts": {str(name): float(value) for name, value in parts.items()}}


def load_rollout(spec: str) -> UserRollout:
    """Load a rollout function.

    Raises:
        ConfigError: it cannot be loaded, is not a coroutine function, or does not take three arguments.
    """
    function = spec.function if isinstance(spec, OwnFunction) else _load_file(spec)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{KEY}={spec}: it is not a coroutine function; write async def f(policy, prompt, ctx)")
    try:
        inspect.signature(function).bind("policy", "prompt", "ctx")
    except TypeError as error:
        found = inspect.signature(function)
        raise ConfigError(
            f"{KEY}={spec}: its parameters are {found} ({error}); let it take (policy, prompt, ctx)"
        ) from None
    return function


@lru_cache(maxsize=1)  # there is a session for each rollout
def _load_file(spec: str) -> Callable[..., Any]:
    return load_function(spec, KEY)


@lru_cache(maxsize=1)
def _text_of(tokenizer: str, template: str, keep: bool) -> TurnText:
    return TurnText(load_tokenizer(tokenizer), template, keep=keep)
