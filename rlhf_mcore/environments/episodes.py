"""Episodes in progress: the state of each episode, and the next requests to an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.environments.control_tokens import UnreadableText, most_characters
from rlhf_mcore.environments.sessions import Sessions, StepResult
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.sampling.checks import REMEDY, LostTrajectory, check_completion
from rlhf_mcore.sampling.episode_log import EpisodeLog, linear_record
from rlhf_mcore.sampling.policy import Limits
from rlhf_mcore.sampling.requests import request_of
from rlhf_mcore.sampling.seeds import request_seed, turn_seed
from rlhf_mcore.types import Completion, EpisodeRequest, Job, Prompt, Request, Score, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlhf_mcore.data.image_rows import ImageReader
    from rlhf_mcore.protocols import RewardFunction

PART = "environment"  # part of a score: the sum of the rewards of all turns


@dataclass(slots=True, eq=False)
class _Episode:
    asked: EpisodeRequest
    prompt: Prompt  # includes the first observation
    max_tokens: int
    started: float
    written: list[Completion | NDArray[np.int32]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # one for each element of written
    rewards: list[float] = field(default_factory=list)  # one for each turn of the policy
    log: EpisodeLog = field(default_factory=EpisodeLog)
    request: Request | None = None  # in progress at the engine
    failure: StepResult | None = None  # a failure before the first turn

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens after the prompt."""
        return sum(len(part.token_ids if isinstance(part, Completion) else part) for part in self.written)


class Episodes:
    """The episodes of an engine, on its lead rank: an :class:`rlhf_mcore.episode_driver.EpisodeDriver`.

    An episode has one turn in flight at most. The turn's request has the id of the episode.

    Args:
        fails: whether an environment that gives no answer ends the run. Otherwise its episode ends without a score.
        overlap: whether the engine samples while environments compute. The batch composition then depends on timing, and the last
            bits of logprobs may too. Without overlap, neither does.
        action_of: returns the action for ``step`` from the text of a turn and the turn.
        pays: whether the policy learns from the environment's rewards.
        images: reads the images of observations; None if the model reads no images.
    """

    def __init__(
        self,
        sessions: Sessions,
        text: TurnText,
        limits: Limits,
        *,
        fails: bool = True,
        overlap: bool = False,
        action_of: Callable[[str, Completion], Any] = lambda text, turn: text,
        pays: bool = True,
        images: ImageReader | None = None,
    ) -> None:
        self._sessions, self._text, self._limits, self._images = sessions, text, limits, images
        self._fails, self._overlap, self._action_of, self._pays = fails, overlap, action_of, pays
        self._open: dict[int, _Episode] = {}
        self._requests: list[Request] = []
        self._finished: list[Completion] = []

    @property
    def num_open(self) -> int:
        """Return the number of episodes that ``take`` has not returned yet."""
        return len(self._open) + len(self._finished)

    @property
    def num_waiting(self) -> int:
        """Return the number of episodes that wait for their environment."""
        return self._sessions.num_calls

    def begin(self, requests: Sequence[Request]) -> list[Request]:
        """Reset an environment for each episode request. Returns the other requests, which are single turns."""
        for request in requests:
            if isinstance(request, EpisodeRequest):
                prompt, sampling = request.prompt, request.sampling
                max_tokens = self._limits.max_tokens or sampling.max_new_tokens
                self._open[request.request_id] = _Episode(request, prompt, max_tokens, time.monotonic())
                # All responses of a group get the same task, because their scores are compared. If a prompt occurs again in the
                # step, its next group gets another seed.
                seed = request_seed(sampling.seed, request.step, prompt.index, -1 - prompt.occurrence)
                row = row_of(prompt)
                if self._images is not None and prompt.images:
                    row = {**row, "images": self._images.files(prompt.images)}
                self._sessions.open(request.request_id, row, seed)
        return [request for request in requests if not isinstance(request, EpisodeRequest)]

    def watch(self, drawn: Callable[[Collection[int]], Mapping[int, Sequence[int]]], slots: int | None = None) -> None:
        """Do nothing. An environment receives whole turns, and the engine receives all due turns at once."""

    num_held = 0

    def abandoned_turns(self) -> Collection[int]:
        """Return nothing. A turn has the id of its episode, and is cancelled with the episode."""
        return ()

    def lend(self, most: int) -> list[Request]:
        """Return []. No turn is held back."""
        return []

    def cancel(self, request_ids: Collection[int]) -> None:
        """Drop these episodes. Unknown ids are ignored."""
        for key in self._open.keys() & set(request_ids):
            del self._open[key]
            self._sessions.close(key)
        self._requests = [request for request in self._requests if request.request_id in self._open]
        self._finished = [each for each in self._finished if each.request_id not in request_ids]

    def abandon(self) -> None:
        """Drop all episodes."""
        self.cancel(list(self._open))

    def due(self, engine_draws: bool, wait_s: float | None) -> list[Request] | None:
        """Return the turns to sample (:class:`rlhf_mcore.episode_driver.EpisodeDriver`).

        None if the engine has nothing to sample, or must not sample yet.

        Raises:
            ConfigError: an environment gave no answer, and ``fails`` is set.
        """
        if self.num_waiting:
            self._poll(0.0 if self._overlap and (engine_draws or self._requests) else wait_s)
        if self.num_waiting and not (self._overlap and (engine_draws or self._requests)):
            return None
        requests, self._requests = sorted(self._requests, key=lambda request: request.request_id), []
        return requests

    def take(self, completions: Iterable[Completion]) -> list[Completion]:
        """Send the texts of turns to their environments. Returns the episodes that ended, and completions of other requests.

        Raises:
            LostTrajectory: a turn was not requested.
            RuntimeError: a turn is not valid for training.
        """
        others = []
        for completion in completions:
            if completion.request_id in self._open:
                self._take(completion)
            else:
                others.append(completion)
        finished, self._finished = self._finished, []
        return others + finished

    def _take(self, completion: Completion) -> None:
        key = completion.request_id
        each = self._open[key]
        if each.request is None:
            raise LostTrajectory(f"the engine answered {each.asked.name} twice. {REMEDY}")
        check_completion(each.request, completion)
        each.request = None
        each.written.append(completion)
        each.texts.append(self._text.text_of(completion.token_ids))
        turn = len(each.log.turns) - 1
        each.log.end_turn(turn)
        each.log.add_node(turn, turn)
        if each.failure is not None:
            self._fail(key, each.failure)
        else:
            action = self._action_of(each.texts[-1], completion)
            each.log.begin_step(turn, action)
            self._sessions.step(key, action)

    def _poll(self, timeout_s: float | None) -> None:
        """Continue the episodes whose environment has answered. Waits at most ``timeout_s`` for the first answer."""
        for key, answer in self._sessions.poll(timeout_s):
            each = self._open[key]
            each.log.end_step()
            if answer.error:
                self._fail(key, answer)
                continue
            try:
                if not each.written:
                    self._begin_first_turn(key, each, answer)
                else:
                    self._next_turn(key, each, answer)
            except UnreadableText as error:
                self._fail(key, StepResult(error=str(error)))
            except ConfigError:
                raise
            except Exception as error:
                self._fail(key, StepResult(error=f"failed in the trainer ({type(error).__name__}: {error})"))

    # ---------------------------------------------------------------------------------------------------------- turns
    def _begin_first_turn(self, key: int, each: _Episode, answer: StepResult) -> None:
        if answer.messages:
            if (size := _num_characters(answer)) > most_characters(each.max_tokens):
                raise UnreadableText(f"returned a first observation of {size:,} characters, which is too long")
            prompt = self._seen(each.prompt, answer)
            tokens, text = self._text.opening(prompt, answer.messages, special=answer.special)
            tokens = self._expand(tokens, prompt.images)
            added = len(tokens) - len(each.prompt.prompt_ids)
            if added >= each.max_tokens:
                error = f"returned a first observation of {added} tokens, which fills the {each.max_tokens} tokens of an episode"
                self._fail(key, StepResult(error=error))
                return
            each.prompt = replace(prompt, prompt_ids=tokens, text=text)
            each.max_tokens -= max(added, 0)
        self._ask(key, each)

    def _next_turn(self, key: int, each: _Episode, answer: StepResult) -> None:
        each.rewards.append(answer.reward)
        turn = each.written[-1]
        assert isinstance(turn, Completion)
        if answer.done:
            self._finish(key, "stop")
        elif len(each.rewards) >= self._limits.max_turns:
            self._finish(key, "turns")
        elif self._limits.max_seconds is not None and time.monotonic() - each.started >= self._limits.max_seconds:
            self._finish(key, "seconds")
        elif _num_characters(answer) > most_characters(each.max_tokens):
            self._finish(key, "length")
        else:
            prompt = self._seen(each.prompt, answer)
            new = prompt.images[len(each.prompt.images) :]
            tokens = self._expand(self._text.after(turn, answer.messages, special=answer.special), new)
            if new and self._has_drawn_images(each):
                self._finish(key, "length")  # see _has_drawn_images
                return
            if each.num_tokens + len(tokens) >= each.max_tokens:
                self._finish(key, "length")  # no token is left after the observation
                return
            each.prompt = prompt
            if tokens:
                each.written.append(np.array(tokens, np.int32))
                each.texts.append("".join(message["content"] for message in answer.messages))
            self._ask(key, each)

    def _seen(self, prompt: Prompt, answer: StepResult) -> Prompt:
        """Return the prompt of an episode with the images of an observation appended to its own images.

        Raises:
            UnreadableText: the images cannot be used.
        """
        sources = [source for message in answer.messages for source in message.get("images", ())]
        if not sources:
            return prompt
        if self._images is None:
            raise UnreadableText("returned an image, but the model reads no images")
        if self._images.writes_around:
            raise UnreadableText("returned an image, but images of this model are supported in prompts only")
        try:
            taken = self._images.take(sources, Path.cwd(), "the observation", seen=len(prompt.images))
        except ConfigError as error:
            raise UnreadableText(f"returned an image that cannot be used: {error}") from error
        return replace(prompt, images=(*prompt.images, *taken))

    def _expand(self, tokens: list[int], images: Sequence[str]) -> list[int]:
        """Return the tokens with the tokens of each image inserted."""
        if self._images is None or not images:
            return tokens
        try:
            return self._images.expand(tokens, images, "the observation")
        except ConfigError as error:
            raise UnreadableText(f"returned an observation whose image tokens are invalid: {error}") from error

    def _has_drawn_images(self, each: _Episode) -> bool:
        """Return whether the policy sampled an image token. A later image could not be distinguished from that token."""
        drawn = [part.token_ids for part in each.written if isinstance(part, Completion)]
        return self._images is not None and any((ids == self._images.tokens.token_id).any() for ids in drawn)

    def _ask(self, key: int, each: _Episode) -> None:
        room = each.max_tokens - each.num_tokens
        asked = each.asked
        first = request_of(Job(key, each.prompt, asked.sample, asked.sampling, asked.step))
        if each.written:
            parts = [part.token_ids if isinstance(part, Completion) else part for part in each.written]
            prompt_ids = np.concatenate([np.array(each.prompt.prompt_ids, np.int32), *parts]).tolist()
            seed = turn_seed(first.seed, len(each.rewards))
            first = replace(first, name=f"{first.name}, turn {len(each.rewards)}", prompt_ids=prompt_ids, seed=seed)
        sampling = replace(asked.sampling, max_new_tokens=min(asked.sampling.max_new_tokens, room))
        each.request = replace(first, sampling=sampling)
        each.log.begin_turn(len(each.log.turns))
        self._requests.append(each.request)

    def _fail(self, key: int, answer: StepResult) -> None:
        """End an episode whose environment gave no answer. Its last turn stays without an observation.

        Raises:
            ConfigError: ``fails`` is set.
        """
        each = self._open[key]
        cause = f"{self._sessions.name} on {each.asked.name}, turn {len(each.rewards)}, {answer.error}"
        if self._fails:
            raise ConfigError(f"{cause}. Correct it, or set reward.on_error=zero to score such an episode 0")
        if not each.written:  # a trajectory needs at least one turn of the policy
            each.failure = answer
            self._ask(key, each)
            return
        kind = "timeout" if answer.timed_out else "error"
        self._finish(key, "environment", Score(0.0, failure=kind, cause=cause))

    def _finish(self, key: int, reason: str, score: Score | None = None) -> None:
        """End an episode.

        Its score is the sum of all rewards. Rewards before the last are also stored at their turns; the last reward is the
        remainder of the score.
        """
        each = self._open.pop(key)
        self._sessions.close(key)
        rewards, text = [*each.rewards[:-1], 0.0] if self._pays and not score else [], ""
        drawn = episode(each.prompt, each.asked.sample, each.written, text, rewards)
        turns = [replace(turn, text=text) for turn, text in zip(drawn.turns[1:], each.texts, strict=True)]
        said = next(turn.text for turn in reversed(turns) if turn.writer == "policy")
        score = score or Score(total := sum(each.rewards), {PART: total})
        whole = replace(drawn, turns=(drawn.turns[0], *turns), response_text=said, finish_reason=reason, score=score)
        whole = replace(whole, record=linear_record(each.log, each.prompt.text, each.written, each.texts))
        last = next(part for part in reversed(each.written) if isinstance(part, Completion))
        self._finished.append(replace(last, trajectory=whole))


def _num_characters(answer: StepResult) -> int:
    return sum(len(message["content"]) for message in answer.messages)


def row_of(prompt: Prompt) -> Mapping[str, Any]:
    """Build the row for ``reset``, as JSON values.

    Raises:
        ConfigError: the ground truth or extra_info cannot be written as JSON.
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
            f"prompt {prompt.prompt_id!r}: ground_truth or extra_info cannot be sent to environment.function as JSON: {error}. "
            "Store such values as texts or numbers"
        ) from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class EnvironmentReward:
    """The reward of a run with an environment.

    ``graders`` score the last turn; None means that only the environment's rewards count. ``adds``: whether the environment's
    rewards are added to the graders' score.
    """

    graders: RewardFunction | None = None
    adds: bool = True

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of episodes. An episode whose environment failed keeps its failure as the score."""
        graded: Sequence[Score | None] = [None] * len(trajectories)
        if self.graders is not None:
            graded = await self.graders.score(trajectories)
        return [self._score(trajectory, score) for trajectory, score in zip(trajectories, graded, strict=True)]

    def _score(self, trajectory: Trajectory, graded: Score | None) -> Score:
        own = trajectory.score
        assert own is not None, "an episode of an environment"
        if own.failure is not None or graded is None:
            return own
        if not self.adds:
            return graded
        value, parts = graded.value + own.value, own.parts | graded.parts
        return Score(value, parts, graded.failure, graded.cause, graded.answered)
