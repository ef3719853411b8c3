"""Episodes on their way: whose turn it is in each, and what the next requests to an engine are."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.environments.sessions import Answer, Sessions
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.trainer.rollouts import REMEDY, LostTrajectory, check_completion, request_of, request_seed
from rlhf_mcore.types import Completion, Prompt, Request, Sampling, Score, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable

PART = "environment"  # of a score: the rewards of all turns


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """``max_tokens``: of everything after the prompt, the environment's included; None: as the longest response of the sampling."""

    max_turns: int
    max_tokens: int | None = None
    max_seconds: float | None = None


@dataclass(slots=True, eq=False)
class _Episode:
    prompt: Prompt  # with the first observation
    sample: int
    sampling: Sampling
    step: int
    max_tokens: int
    started: float
    written: list[Completion | NDArray[np.int32]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of what was written
    rewards: list[float] = field(default_factory=list)  # of the policy's turns
    request: Request | None = None  # that is being answered
    failure: Answer | None = None  # before the first turn

    @property
    def num_tokens(self) -> int:
        """After the prompt."""
        return sum(len(part.token_ids if isinstance(part, Completion) else part) for part in self.written)

    @property
    def name(self) -> str:
        return f"prompt {self.prompt.prompt_id!r}, sample {self.sample}"


class Episodes:
    """The episodes of an engine, in its leading rank.

    The engine's requests have the keys of their episodes as ids: an episode has one at a time.

    Args:
        fails: an environment without an answer ends the run; else its episode ends without a score.
        action_of: what ``step`` gets, from the text of a turn.
    """

    def __init__(
        self,
        sessions: Sessions,
        text: TurnText,
        limits: EpisodeLimits,
        *,
        fails: bool = True,
        action_of: Callable[[str], Any] = str,
    ) -> None:
        self._sessions, self._text, self._limits = sessions, text, limits
        self._fails, self._action_of = fails, action_of
        self._open: dict[int, _Episode] = {}
        self._requests: list[Request] = []
        self._finished: list[tuple[int, Trajectory]] = []

    @property
    def num_open(self) -> int:
        """Episodes that are not finished."""
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        """Those of them that wait for their environment."""
        return self._sessions.num_calls

    @property
    def has_requests(self) -> bool:
        """Whether ``requests`` has something to return."""
        return bool(self._requests)

    @property
    def has_finished(self) -> bool:
        """Whether ``finished`` has something to return."""
        return bool(self._finished)

    def begin(self, key: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> None:
        """Reset an environment for response ``sample`` to a prompt of ``step``."""
        max_tokens = self._limits.max_tokens or sampling.max_new_tokens
        self._open[key] = _Episode(prompt, sample, sampling, step, max_tokens, time.monotonic())
        # All responses to a prompt face the same task: groups are compared. Its further occurrences in a step have others.
        seed = request_seed(sampling.seed, step, prompt.index, -1 - prompt.occurrence)
        self._sessions.open(key, _row(prompt), seed)

    def requests(self) -> list[Request]:
        """What an engine is to draw next; each is returned once."""
        requests, self._requests = sorted(self._requests, key=lambda request: request.request_id), []
        return requests

    def finished(self) -> list[tuple[int, Trajectory]]:
        """Episodes that have ended, with their keys; each is returned once."""
        finished, self._finished = self._finished, []
        return finished

    def take(self, completion: Completion) -> None:
        """A turn of the policy: its text goes to the environment.

        Raises:
            LostTrajectory: it was not asked for.
            RuntimeError: it must not be trained on.
        """
        key = completion.request_id
        each = self._open.get(key)
        if each is None or each.request is None:
            raise LostTrajectory(f"the engine answered request {key}, which was not made or had its answer. {REMEDY}")
        check_completion(each.request, completion)
        each.request = None
        each.written.append(completion)
        each.texts.append(self._text.text_of(completion.token_ids))
        if each.failure is not None:
            self._fail(key, each.failure)
        else:
            self._sessions.step(key, self._action_of(each.texts[-1]))

    def poll(self, timeout_s: float | None) -> None:
        """Go on with episodes whose environment has answered. Waits for one of them, but no longer than ``timeout_s``.

        Raises:
            ConfigError: an environment gave no answer, and that ends the run.
        """
        for key, answer in self._sessions.poll(timeout_s):
            each = self._open[key]
            if answer.error:
                self._fail(key, answer)
            elif not each.written:
                self._begin_first_turn(key, each, answer)
            else:
                self._next_turn(key, each, answer)

    def abandon(self) -> None:
        """Forget all episodes."""
        for key in self._open:
            self._sessions.close(key)
        self._open, self._requests, self._finished = {}, [], []

    # ---------------------------------------------------------------------------------------------------------- turns
    def _begin_first_turn(self, key: int, each: _Episode, answer: Answer) -> None:
        if answer.messages:
            tokens, text = self._text.opening(each.prompt, answer.messages)
            added = len(tokens) - len(each.prompt.prompt_ids)
            if added >= each.max_tokens:
                error = f"returned a first observation of {added} tokens, which leaves no room in {each.max_tokens} of an episode"
                self._fail(key, Answer(error=error))
                return
            each.prompt = replace(each.prompt, prompt_ids=tokens, text=text)
            each.max_tokens -= max(added, 0)
        self._ask(key, each)

    def _next_turn(self, key: int, each: _Episode, answer: Answer) -> None:
        each.rewards.append(answer.reward)
        turn = each.written[-1]
        assert isinstance(turn, Completion)
        if answer.done:
            self._finish(key, "stop")
        elif len(each.rewards) >= self._limits.max_turns:
            self._finish(key, "turns")
        elif self._limits.max_seconds is not None and time.monotonic() - each.started >= self._limits.max_seconds:
            self._finish(key, "seconds")
        else:
            tokens = self._text.after(turn, answer.messages)
            if each.num_tokens + len(tokens) >= each.max_tokens:
                self._finish(key, "length")  # no token is left after the observation
                return
            if tokens:
                each.written.append(np.array(tokens, np.int32))
                each.texts.append("".join(message["content"] for message in answer.messages))
            self._ask(key, each)

    def _ask(self, key: int, each: _Episode) -> None:
        room = each.max_tokens - each.num_tokens
        first = request_of(key, each.prompt, each.sample, each.sampling, each.step)
        if each.written:
            parts = [part.token_ids if isinstance(part, Completion) else part for part in each.written]
            prompt_ids = np.concatenate([np.array(each.prompt.prompt_ids, np.int32), *parts]).tolist()
            seed = turn_seed(first.seed, len(each.rewards))
            first = replace(first, name=f"{first.name}, turn {len(each.rewards)}", prompt_ids=prompt_ids, seed=seed)
        sampling = replace(each.sampling, max_new_tokens=min(each.sampling.max_new_tokens, room))
        each.request = replace(first, sampling=sampling)
        self._requests.append(each.request)

    def _fail(self, key: int, answer: Answer) -> None:
        """An environment without an answer. What it has not seen is answered by nobody, so the episode ends with it."""
        each = self._open[key]
        cause = f"{self._sessions.name} on {each.name}, turn {len(each.rewards)}, {answer.error}"
        if self._fails:
            raise ConfigError(f"{cause}. Correct it, or set reward.on_error=zero to score such an episode 0")
        if not each.written:  # a row needs a turn of the policy
            each.failure = answer
            self._ask(key, each)
            return
        kind = "timeout" if answer.timed_out else "error"
        self._finish(key, "environment", Score(0.0, failure=kind, cause=cause))

    def _finish(self, key: int, reason: str, score: Score | None = None) -> None:
        """The last reward is the score at the end; those before it belong to their turns."""
        each = self._open.pop(key)
        self._sessions.close(key)
        rewards, text = [*each.rewards[:-1], 0.0], ""
        drawn = episode(each.prompt, each.sample, each.written, text, [] if score else rewards)
        turns = [replace(turn, text=text) for turn, text in zip(drawn.turns[1:], each.texts, strict=True)]
        last = next(turn.text for turn in reversed(turns) if turn.writer == "policy")
        score = score or Score(each.rewards[-1], {PART: sum(each.rewards)})
        whole = replace(drawn, turns=(drawn.turns[0], *turns), response_text=last, finish_reason=reason, score=score)
        self._finished.append((key, whole))


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a later turn of an episode, whose first one has ``seed``: unrelated to those of all others."""
    digest = hashlib.blake2b(struct.pack("<2q", seed, turn), digest_size=8, person=b"turn").digest()
    return int.from_bytes(digest, "little") >> 1


def _row(prompt: Prompt) -> Mapping[str, Any]:
    """What ``reset`` gets, as JSON values.

    Raises:
        ConfigError: the ground truth or extra_info are no JSON.
    """
    row = {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
        "data_source": prompt.data_source,
    }
    try:
        return json.loads(json.dumps(row, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"environment.function is given ground_truth and extra_info as JSON, and those of prompt {prompt.prompt_id!r} are not: "
            f"{error}. Store such values as texts or numbers"
        ) from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")
