"""Run an episode with an environment: turns of the policy, each followed by an observation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.environments.sessions import Session, Sessions, StepResult
from rlhf_mcore.environments.turn_text import TurnText, UnreadableText, most_characters
from rlhf_mcore.rewards.pool import encode_item
from rlhf_mcore.sampling.episode_log import linear_record
from rlhf_mcore.types import Completion, Prompt, Score, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.data.image_rows import ImageReader
    from rlhf_mcore.protocols import RewardFunction
    from rlhf_mcore.sampling.rollouts import Context, Policy

PART = "environment"  # part of a score: the sum of the rewards of all turns
T = TypeVar("T")


class _Failed(Exception):
    """The environment gave no usable answer. The message explains the cause."""

    def __init__(self, cause: str, timed_out: bool = False) -> None:
        super().__init__(cause)
        self.timed_out = timed_out


@dataclass(slots=True, eq=False)
class _Episode:
    policy: Policy
    prompt: Prompt  # includes the first observation
    max_tokens: int
    written: list[Completion | NDArray[np.int32]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # one for each element of written
    rewards: list[float] = field(default_factory=list)  # one for each turn of the policy

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens after the prompt."""
        return sum(len(part.token_ids if isinstance(part, Completion) else part) for part in self.written)

    def tokens(self) -> Sequence[int]:
        """Return all tokens."""
        if not self.written:
            return self.prompt.prompt_ids
        parts = [part.token_ids if isinstance(part, Completion) else part for part in self.written]
        tokens: list[int] = np.concatenate([np.array(self.prompt.prompt_ids, np.int32), *parts]).tolist()
        return tokens


class EnvironmentRollout:
    """Runs episodes with an environment: a :data:`rlhf_mcore.sampling.rollouts.RolloutFunction`.

    Args:
        fails: whether an environment that gives no answer ends the run. Otherwise its episode ends without a score.
        action_of: returns the action for ``step`` from the text of a turn and the turn.
        pays: whether the policy learns from the environment's rewards.
        images: reads the images of observations; None if the model reads no images.
    """

    def __init__(
        self,
        sessions: Sessions,
        text: TurnText,
        *,
        fails: bool = True,
        action_of: Callable[[str, Completion], Any] = lambda text, turn: text,
        pays: bool = True,
        images: ImageReader | None = None,
    ) -> None:
        self._sessions, self._text, self._images = sessions, text, images
        self._fails, self._action_of, self._pays = fails, action_of, pays

    async def __call__(self, policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
        """Run an episode.

        Raises:
            ConfigError: the environment gave no answer, and ``fails`` is set.
        """
        row, score = row_of(prompt), None
        if self._images is not None and prompt.images:
            row = {**row, "images": self._images.files(prompt.images)}
        each = _Episode(policy, prompt, ctx.limits.max_tokens or ctx.job.sampling.max_new_tokens)
        session = self._sessions.open(row, ctx.seed)
        try:
            reason = await self._run(each, session)
        except _Failed as failure:
            cause = f"{self._sessions.name} on {ctx.job.name}, turn {len(each.rewards)}, {failure}"
            if self._fails:
                raise ConfigError(
                    f"{cause}. Correct it, or set reward.on_error=zero to score such an episode 0"
                ) from failure
            if not each.written:  # a trajectory needs at least one turn of the policy
                await self._sample_turn(each)
            reason = "environment"
            score = Score(0.0, failure="timeout" if failure.timed_out else "error", cause=cause)
        finally:
            session.close()
        return self._trajectory(each, ctx.job.sample, reason, score)

    async def _run(self, each: _Episode, session: Session) -> str:
        """Run the turns of an episode. Returns the reason of its end."""
        answer = await session.reset()
        _contain(self._add_opening, each, answer)
        while True:
            turn = await self._sample_turn(each)
            action = self._action_of(each.texts[-1], turn)
            each.policy.log.begin_step(each.policy.num_turns - 1, action)
            answer = await session.step(action)
            each.policy.log.end_step()
            if reason := _contain(self._add_observation, each, answer):
                return reason

    async def _sample_turn(self, each: _Episode) -> Completion:
        room, policy = each.max_tokens - each.num_tokens, each.policy
        turn = await policy.sample(each.tokens(), max_tokens=room, images=each.prompt.images)
        each.written.append(turn)
        each.texts.append(self._text.text_of(turn.token_ids))
        policy.log.add_node(policy.num_turns - 1, policy.num_turns - 1)
        return turn

    # ---------------------------------------------------------------------------------------------------- observations
    def _add_opening(self, each: _Episode, answer: StepResult) -> None:
        """Add the first observation to the prompt."""
        if not answer.messages:
            return
        if (size := _num_characters(answer)) > most_characters(each.max_tokens):
            raise UnreadableText(f"returned a first observation of {size:,} characters, which is too long")
        prompt = self._seen(each.prompt, answer)
        tokens, text = self._text.opening(prompt, answer.messages, special=answer.special)
        tokens = self._expand(tokens, prompt.images)
        added = len(tokens) - len(each.prompt.prompt_ids)
        if added >= each.max_tokens:
            raise _Failed(
                f"returned a first observation of {added} tokens, which fills the {each.max_tokens} tokens of an episode"
            )
        each.prompt = replace(prompt, prompt_ids=tokens, text=text)
        each.max_tokens -= max(added, 0)

    def _add_observation(self, each: _Episode, answer: StepResult) -> str:
        """Add an observation after a turn. Returns the reason if the episode ends, else ""."""
        each.rewards.append(answer.reward)
        turn = each.written[-1]
        assert isinstance(turn, Completion)
        if answer.done:
            return "stop"
        if limit := each.policy.reached_limit():
            return limit
        if _num_characters(answer) > most_characters(each.max_tokens):
            return "length"
        prompt = self._seen(each.prompt, answer)
        new = prompt.images[len(each.prompt.images) :]
        tokens = self._expand(self._text.after(turn, answer.messages, special=answer.special), new)
        if new and self._has_drawn_images(each):
            return "length"  # see _has_drawn_images
        if each.num_tokens + len(tokens) >= each.max_tokens:
            return "length"  # no token is left after the observation
        each.prompt = prompt
        if tokens:
            each.written.append(np.array(tokens, np.int32))
            each.texts.append("".join(message["content"] for message in answer.messages))
        return ""

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

    def _trajectory(self, each: _Episode, sample: int, reason: str, score: Score | None) -> Trajectory:
        """Return the trajectory of an episode.

        Its score is the sum of all rewards, unless ``score`` is given. Rewards before the last are also stored at their turns; the
        last reward is the remainder of the score.
        """
        rewards, text = [*each.rewards[:-1], 0.0] if self._pays and not score else [], ""
        drawn = episode(each.prompt, sample, each.written, text, rewards)
        turns = [replace(turn, text=text) for turn, text in zip(drawn.turns[1:], each.texts, strict=True)]
        said = next(turn.text for turn in reversed(turns) if turn.writer == "policy")
        score = score or Score(total := sum(each.rewards), {PART: total})
        record = linear_record(each.policy.log, each.prompt.text, each.written, each.texts)
        whole = replace(drawn, turns=(drawn.turns[0], *turns), response_text=said, finish_reason=reason, score=score)
        return replace(whole, record=record)


def _contain(process: Callable[[_Episode, StepResult], T], each: _Episode, answer: StepResult) -> T:
    """Process an answer of the environment. An error ends its episode.

    Raises:
        _Failed: the answer is an error, or cannot be processed.
    """
    if answer.error:
        raise _Failed(answer.error, answer.timed_out)
    try:
        return process(each, answer)
    except UnreadableText as error:
        raise _Failed(str(error)) from error
    except (ConfigError, _Failed):
        raise
    except Exception as error:
        raise _Failed(f"failed in the trainer ({type(error).__name__}: {error})") from error


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
        return json.loads(encode_item(row))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"prompt {prompt.prompt_id!r}: ground_truth or extra_info cannot be sent to environment.function as JSON: {error}. "
            "Store such values as texts or numbers"
        ) from error


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
