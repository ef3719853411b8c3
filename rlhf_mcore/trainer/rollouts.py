"""From prompts to requests, and from completions to trajectories: each response that was asked for, once."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlhf_mcore.config.errors import shortened
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.protocols import EngineRank, StreamingGenerator
from rlhf_mcore.trainer.dealing import Dealer
from rlhf_mcore.types import Completion, EpisodeRequest, Prompt, Request, Sampling, Trajectory

# Number, prompt, sample, sampling, step -> what an engine is asked for.
MakeRequest = Callable[[int, Prompt, int, Sampling, int], Request]
Decode = Callable[
    ["Sequence[Sequence[int]]"], "list[str]"
]  # token ids of responses -> their texts without special tokens

_SEED_BITS = 63  # torch.Generator and vLLM both take any non-negative int64
REMEDY = "Nothing of this step was trained on; start the run again (trainer.max_restarts does so by itself)"


class LostTrajectory(RuntimeError):
    """What the engines returned is not what they were asked for. It is found before anything is trained on the step."""


@dataclass(slots=True)
class Rollouts:
    """What this rank owns of a step: nothing, unless it leads an engine. Lists run in parallel."""

    positions: list[int]  # place of each trajectory's prompt among the step's prompts
    trajectories: list[Trajectory]


def request_of(number: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> Request:
    """Request ``number``: for response ``sample`` to a prompt of ``step``."""
    # A prompt's further occurrences are seeded as further samples: the second has those from ``sampling.n`` on.
    seed = request_seed(sampling.seed, step, prompt.index, prompt.occurrence * sampling.n + sample)
    return Request(number, f"prompt {prompt.prompt_id!r}, sample {sample}", prompt.prompt_ids, sampling, seed)


def episode_request(number: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> EpisodeRequest:
    """Request ``number``: for an episode in place of response ``sample``."""
    first = request_of(number, prompt, sample, sampling, step)
    return EpisodeRequest(number, first.name, prompt.prompt_ids, sampling, first.seed, prompt, sample, step)


def request_seed(seed: int, step: int, prompt_index: int, sample: int) -> int:
    """The seed that response ``sample`` to the prompt in row ``prompt_index`` is drawn with at ``step``.

    It is the first 63 bits of BLAKE2b over the four numbers (little-endian int64, in the order of the arguments), so
    it is the same on every machine and Python version, and responses of neighbouring prompts, samples or steps are
    unrelated. Samples are counted over all occurrences of the row in the step. Nothing else enters it: a rollout depends
    neither on the engine that ran it nor on its neighbours in a batch.

    Raises:
        struct.error: an argument does not fit in a signed 64-bit integer.
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, prompt_index, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


@dataclass(frozen=True, slots=True)
class RolloutWorker:
    """This rank's engine, as the trainer uses it."""

    generator: StreamingGenerator
    engine: EngineRank
    decode: Decode
    make_request: MakeRequest = request_of
    dealer: Dealer = field(default_factory=Dealer)

    def rollouts(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
        finished: Callable[[int, list[Trajectory]], None] = lambda position, trajectories: None,
    ) -> Rollouts:
        """An engine draws all samples of a prompt, so that they share the prompt's cache; ``dealer`` decides which engine.

        ``prompts`` are those of the whole step. One that comes again is numbered, and gets other responses. ``finished`` gets the
        position of a prompt and its trajectories while those of others are still drawn.

        Raises:
            LostTrajectory: a response is missing, doubled, or was not asked for.
            RuntimeError: a response that must not be trained on.
        """
        numbered, share = number_occurrences(prompts), self.dealer.share(prompts, sampling.n, self.engine)
        asked: dict[int, list[Request]] = {}  # by the places of their prompts in the step
        open_groups: dict[int, list[Completion]] = {}
        completions: list[Completion] = []
        rollouts: dict[int, list[Trajectory]] = {}
        while True:
            begun = {
                place: self._requests([numbered[place]], sampling, step, place)
                for place in share.take(self.generator.num_in_flight)
            }
            asked |= begun
            if begun:
                self.generator.submit([request for requests in begun.values() for request in requests])
            if not self.generator.num_in_flight:
                break
            for completion in self.generator.collect(math.inf):
                completions.append(completion)
                place = completion.request_id // sampling.n
                group = open_groups.setdefault(place, [])
                group.append(completion)
                if len(group) == sampling.n and place in asked and place not in rollouts:
                    rollouts[place] = self._trajectories([numbered[place]], asked[place], open_groups.pop(place))
                    finished(place, rollouts[place])
        expected = asked if self.engine.is_lead else {}
        if open_groups or rollouts.keys() != expected.keys():
            matched([request for requests in expected.values() for request in requests], completions)
        places = sorted(rollouts)
        return Rollouts([p for p in places for _ in rollouts[p]], [t for p in places for t in rollouts[p]])

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """``sampling.n`` responses to each prompt, in this order; [] on ranks that do not lead their engine.

        Raises:
            LostTrajectory, RuntimeError: as ``rollouts``.
        """
        requests = self._requests(prompts, sampling, step)
        completions = self.generator.generate(requests)
        return self._trajectories(prompts, requests if self.engine.is_lead else [], completions)

    def _trajectories(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], completions: Sequence[Completion]
    ) -> list[Trajectory]:
        """``requests``: of each prompt as many."""
        found = matched(requests, completions)
        num_samples = len(requests) // max(len(prompts), 1)
        asked = [(prompts[number // num_samples], number % num_samples) for number in range(len(requests))]
        return trajectories_of(asked, found, self.decode)

    def _requests(self, prompts: Sequence[Prompt], sampling: Sampling, step: int, first: int = 0) -> list[Request]:
        """Their ids: the place of the prompt, counted from ``first``, times the number of samples, plus that of the sample."""
        samples = [(prompt, sample) for prompt in prompts for sample in range(sampling.n)]
        return [
            self.make_request(number, prompt, sample, sampling, step)
            for number, (prompt, sample) in enumerate(samples, first * sampling.n)
        ]


def trajectories_of(
    asked: Sequence[tuple[Prompt, int]], completions: Sequence[Completion], decode: Decode
) -> list[Trajectory]:
    """Of completions for prompts and samples, in their order. Episodes of several turns are whole already."""
    single = [completion.token_ids.tolist() for completion in completions if completion.trajectory is None]
    texts = iter(decode(single) if single else [])
    return [
        completion.trajectory or episode(prompt, sample, [completion], next(texts))
        for (prompt, sample), completion in zip(asked, completions, strict=True)
    ]


def matched(requests: Sequence[Request], completions: Sequence[Completion]) -> list[Completion]:
    """The completions in the order of their requests.

    Raises:
        LostTrajectory: a request has no completion or several, or a completion belongs to none of the requests.
        RuntimeError: see ``check_completion``.
    """
    by_id: dict[int, list[Completion]] = {request.request_id: [] for request in requests}
    unknown = [c.request_id for c in completions if c.request_id not in by_id]
    for completion in completions:
        by_id.get(completion.request_id, []).append(completion)
    problems = [
        f"{len(found) or 'none'} for {request.name}"
        for request in requests
        if len(found := by_id[request.request_id]) != 1
    ]
    problems += [f"one for request {request_id}, which was not made" for request_id in unknown]
    if problems:
        raise LostTrajectory(
            f"the engine returned {len(completions)} completions for {len(requests)} requests: {shortened(problems)}. {REMEDY}"
        )
    for request in requests:
        check_completion(request, by_id[request.request_id][0])
    return [by_id[request.request_id][0] for request in requests]


def check_completion(request: Request, completion: Completion) -> None:
    """Refuse what training must not see.

    Raises:
        RuntimeError: no token, a count of logprobs that differs from the count of tokens, a logprob that is NaN,
            infinite or positive, a request that did not finish, or a support that is not there or lacks its token. The message names
            the prompt.
    """
    tokens, logprobs, where = completion.token_ids, completion.logprobs, request.name
    if not len(tokens):
        raise RuntimeError(f"the engine returned no token for {where}")
    if len(logprobs) != len(tokens):
        raise RuntimeError(f"the engine returned {len(logprobs)} logprobs for {len(tokens)} tokens ({where})")
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > 1e-5))
    if len(wrong):
        raise RuntimeError(f"the engine returned logprob {logprobs[wrong[0]]} at token {wrong[0]} of {where}")
    if request.sampling.records_support and completion.trajectory is None:
        _check_support(completion, where)
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine gave up with finish_reason={completion.finish_reason!r} for {where}")


def _check_support(completion: Completion, where: str) -> None:
    support, tokens = completion.support, completion.token_ids
    if support is None or len(support.counts) != len(tokens):
        count = "none" if support is None else f"those of {len(support.counts)} tokens"
        raise RuntimeError(
            f"the engine did not record which tokens top_p and top_k had left to draw from: {count} for {len(tokens)} tokens "
            f"({where}); set rollout.sampling.top_p=1 and top_k=-1"
        )
    is_own = support.values == tokens.repeat(support.counts)
    owners = np.arange(len(tokens)).repeat(support.counts)
    lacking = np.flatnonzero(np.bincount(owners[is_own], minlength=len(tokens)) != 1)
    if len(lacking):
        raise RuntimeError(f"the engine drew token {lacking[0]} of {where} from others than it recorded")


def number_occurrences(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a step, each with the number of times that its row came before."""
    seen: Counter[int] = Counter()
    numbered = []
    for prompt in prompts:
        numbered.append(replace(prompt, occurrence=seen[prompt.index]) if seen[prompt.index] else prompt)
        seen[prompt.index] += 1
    return numbered
