"""Episodes of a rollout function (``rollout.function``): sample the turns that it requests, and record them as a token tree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.agents.program import NO_TURN
from rlhf_mcore.environments.agents.tree import Node, TokenTree, cut_at_stop, tree_record
from rlhf_mcore.environments.environment import row_of
from rlhf_mcore.environments.function_worker import FunctionEnvironment
from rlhf_mcore.environments.sessions import StepResult
from rlhf_mcore.environments.worker import Environments
from rlhf_mcore.types import Completion, Score

if TYPE_CHECKING:
    from rlhf_mcore.data.image_rows import ImageReader
    from rlhf_mcore.environments.sessions import Sessions
    from rlhf_mcore.environments.turn_text import TurnText
    from rlhf_mcore.protocols import RewardFunction
    from rlhf_mcore.sampling.rollouts import Context, Policy
    from rlhf_mcore.types import Prompt, Trajectory

PART = "rollout"  # part of a score: the reward that the function returned


@dataclass(frozen=True, slots=True)
class FunctionRollout:
    """Runs a user's function: a :data:`rlhf_mcore.sampling.rollouts.RolloutFunction`.

    ``sessions`` are sessions of :class:`rlhf_mcore.environments.function_worker.FunctionEnvironment`. ``fails``: whether a function
    without a result ends the run. Otherwise the score of its rollout is a failure. ``branches``: as in :class:`TokenTree`.
    ``images`` is None if the model reads no images.
    """

    sessions: Sessions | InProcessSessions
    text: TurnText
    fails: bool = True
    branches: str = "all"
    images: ImageReader | None = None

    async def __call__(self, policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
        """Run a rollout.

        Raises:
            ConfigError: the function gave no result, and ``fails`` is set.
        """
        messages = prompt.messages or ([{"role": "user", "content": prompt.question}] if prompt.question else None)
        files = self.images.files(prompt.images) if self.images is not None else []
        row = {**row_of(prompt), "tokens": list(prompt.prompt_ids), "messages": messages, "images": files}
        episode, session = _Episode(self, policy, prompt, ctx), self.sessions.open(row, ctx.seed)
        try:
            answer = await session.reset()
            if not answer.error:
                answer = await session.step([])
            while not (answer.error or answer.done):
                answer = await session.step(await episode.sample(answer.messages))
        finally:
            session.close()
        return await episode.end(answer)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn to sample after ``context``, which continues ``parent``. ``images``: digests of the images in the context.

    ``passed``: all tokens before the turn as the function passed them, with a single token for each image that it added.
    """

    number: int
    parent: Node | None
    context: list[int]
    shown: str  # text of the context
    images: tuple[str, ...]
    passed: list[int]
    most: int  # maximum number of tokens, by the limits of the run
    stop: Sequence[str]


class _NoTurn(Exception):
    """The policy samples no turn for a request. ``answer`` is the answer to the function."""

    def __init__(self, **answer: str) -> None:
        super().__init__()
        self.answer = answer


@dataclass(slots=True, eq=False)
class _Episode:
    """The turns of a rollout. ``passed``: for each node of the tree, its tokens up to its end, as in ``_Turn``."""

    rules: FunctionRollout
    policy: Policy
    prompt: Prompt
    ctx: Context
    tree: TokenTree = field(default_factory=TokenTree)
    passed: list[list[int]] = field(default_factory=list)
    reason: str = "stop"  # finish reason if the function returns after the last turn

    async def sample(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Sample turns together. Returns the answers for the function, in order."""
        asked: list[tuple[_Turn, Awaitable[Completion]] | _NoTurn] = []
        for request in requests:
            try:
                asked.append(self._begin(request))
            except _NoTurn as refused:
                asked.append(refused)
        sampled = iter(await asyncio.gather(*(each[1] for each in asked if not isinstance(each, _NoTurn))))
        return [each.answer if isinstance(each, _NoTurn) else self._add(each[0], next(sampled)) for each in asked]

    async def end(self, answer: StepResult) -> Trajectory:
        """Return the trajectory of a function that has ended.

        Raises:
            ConfigError: it gave no result, and ``fails`` is set.
        """
        job, score = self.ctx.job, None
        if not answer.error and not self.tree.nodes:
            answer = StepResult(error=NO_TURN)
        if answer.error:
            count = len(self.tree.nodes)
            cause = f"{self.rules.sessions.name} on {job.name}, after {count} turn{'s' * (count != 1)}, {answer.error}"
            if self.rules.fails:
                raise ConfigError(f"{cause}. Correct it, or set reward.on_error=zero to score such an episode 0")
            if not count:  # a trajectory needs at least one turn of the policy
                await self.sample(
                    [{"tokens": list(self.prompt.prompt_ids), "max_tokens": None, "stop": [], "images": []}]
                )
            score = Score(0.0, failure="timeout" if answer.timed_out else "error", cause=cause)
            self.reason = "environment"
        elif limit := answer.messages[0].get("limit"):
            self.reason = limit
        elif (reward := answer.messages[0]["reward"]) is not None:
            parts = {f"{PART}.{name}": value for name, value in answer.messages[0]["parts"].items()}
            score = Score(reward, {PART: reward, **parts})
        whole = self.tree.trajectory(self.prompt, job.sample, self.rules.branches)
        record = tree_record(self.tree, self.policy.log)
        return replace(
            whole, response_text=self.tree.nodes[-1].said, finish_reason=self.reason, score=score, record=record
        )

    def _begin(self, request: Mapping[str, Any]) -> tuple[_Turn, Awaitable[Completion]]:
        """Start to sample a turn after the deepest node whose tokens a request continues; else a new branch begins.

        Raises:
            _NoTurn: the request is invalid, or the episode has reached a limit.
        """
        passed, given, parent, known = request["tokens"], self.prompt, None, 0
        if not passed:
            raise _NoTurn(error="tokens is empty; start with prompt.tokens")
        before, images, shown = list[int](), tuple[str, ...](), ""
        for node, own in zip(self.tree.nodes, self.passed, strict=True):
            if len(own) >= known and passed[: len(own)] == own:
                parent, known = node, len(own)
        if parent is not None:
            before, images = parent.tokens(), parent.seen()
        elif passed[: len(given.prompt_ids)] == given.prompt_ids:  # its images are already expanded
            before, images, shown, known = given.prompt_ids, given.images, given.text, len(given.prompt_ids)
        added, new = self._read(passed[known:], request["images"], images, parent)
        tokens, shown = [*before, *added], shown + str(self.rules.text.tokenizer.decode(added))
        context, own_images = (added, new) if parent is not None else (tokens, images + new)
        first = len(context if parent is None else parent.path()[0].context)
        sampling, limits = self.ctx.job.sampling, self.ctx.limits
        longest = first + (limits.max_tokens or sampling.max_new_tokens)
        room = (longest if limits.max_total is None else min(longest, limits.max_total)) - len(tokens)
        if reason := self.policy.reached_limit() or ("length" if room < 1 else ""):
            raise _NoTurn(limit=reason)
        most = min(room, sampling.max_new_tokens)
        turn = _Turn(self.policy.num_turns, parent, context, shown, own_images, passed, most, request["stop"])
        limit = min(most, request["max_tokens"] or most)
        return turn, self.policy.sample(tokens, max_tokens=limit, images=images + new)

    def _read(
        self, tokens: list[int], sources: Sequence[Any], seen: Sequence[str], parent: Node | None
    ) -> tuple[list[int], tuple[str, ...]]:
        """Return tokens with the tokens of each image inserted, and the digests of the images. ``seen`` are the earlier images.

        Raises:
            _NoTurn: a token is not in the vocabulary, or an image cannot be used.
        """
        size, reader = len(self.rules.text.tokenizer), self.rules.images
        if wrong := [token for token in tokens if not 0 <= token < size]:
            raise _NoTurn(error=f"token {wrong[0]} is not in the vocabulary of {size} tokens")
        if reader is None:
            if sources:
                raise _NoTurn(error="the model reads no images")
            return tokens, ()
        if sources and reader.writes_around:
            raise _NoTurn(error="images of this model are supported in prompts only")
        sampled = [node.turn.token_ids for node in parent.path()] if parent is not None else []
        if sources and any((ids == reader.tokens.token_id).any() for ids in sampled):
            raise _NoTurn(limit="length")  # a sampled image token could not be distinguished from the image
        try:
            digests = reader.take(sources, Path(), "policy.sample", seen=len(seen))
            return reader.expand(tokens, digests, "policy.sample"), digests
        except ConfigError as error:
            raise _NoTurn(error=str(error)) from error

    def _add(self, turn: _Turn, completion: Completion) -> dict[str, Any]:
        """Add a sampled turn to the tree, up to the first stop text. Returns the answer for the function."""
        kept, stop = cut_at_stop(completion, turn.stop, self.rules.text.tokenizer)
        text, tokens = self.rules.text.text_of(kept.token_ids), kept.token_ids.tolist()
        node = self.tree.add(turn.parent, turn.shown, turn.context, kept, text, images=turn.images)
        self.policy.log.add_node(node.place, turn.number)
        self.passed.append([*turn.passed, *tokens])
        finish_reason = "stop" if stop is not None else kept.finish_reason
        self.reason = "length" if finish_reason == "length" and len(tokens) == turn.most else "stop"
        return {"tokens": tokens, "text": text, "logprobs": kept.logprobs.tolist(), "finish_reason": finish_reason}


class InProcessSession:
    """A session of a function that was passed from Python. It runs in this process, without deadline or memory limit."""

    def __init__(self, sessions: InProcessSessions, row: Mapping[str, Any], seed: int) -> None:
        self._environment = FunctionEnvironment(**sessions.options)
        self._environments = Environments(lambda: self._environment, sessions.name)
        self._row, self._seed = row, seed

    async def reset(self) -> StepResult:
        """See :class:`rlhf_mcore.environments.sessions.Session`, also for the other methods."""
        return await self._call(row=self._row, seed=self._seed, actions=[])

    async def step(self, action: Any) -> StepResult:
        return await self._call(actions=[action])

    def close(self) -> None:
        self._environment.close()

    async def _call(self, **item: Any) -> StepResult:
        return StepResult(**await self._environments.answer({"session": 0, **item}))


@dataclass(frozen=True, slots=True)
class InProcessSessions:
    """The sessions of a function that was passed from Python. ``options``: arguments of ``FunctionEnvironment``."""

    name: str
    options: Mapping[str, Any]

    def open(self, row: Mapping[str, Any], seed: int) -> InProcessSession:
        """Open a session."""
        return InProcessSession(self, row, seed)


@dataclass(frozen=True, slots=True)
class ReturnedReward:
    """The reward of a run with a rollout function. ``graders`` score the rollouts whose function returned no score."""

    graders: RewardFunction

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of trajectories, in order."""
        graded = iter(await self.graders.score([each for each in trajectories if each.score is None]))
        return [each.score or next(graded) for each in trajectories]
