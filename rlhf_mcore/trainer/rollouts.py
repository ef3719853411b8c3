"""From prompts to requests, and from completions to trajectories: each response that was asked for, once."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlhf_mcore.config.errors import shortened
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.protocols import EngineRank, Generator
from rlhf_mcore.trainer.dealing import Dealer
from rlhf_mcore.types import MAX_LOGPROB, ROUTES, Completion, EpisodeRequest, Prompt, Request, Sampling, Trajectory

# Number, prompt, sample, sampling, step -> what an engine is asked for.
MakeRequest = Callable[[int, Prompt, int, Sampling, int], Request]
# Token ids of responses -> their texts without special tokens.
Decode = Callable[["Sequence[Sequence[int]]"], "list[str]"]

_SEED_BITS = 63  # torch.Generator and vLLM both take any non-negative int64
REMEDY = "Nothing of this step was trained on; start the run again (trainer.max_restarts does so by itself)"


class LostTrajectory(RuntimeError):
    """Engines have returned something else than they were asked for. Nothing was trained on the step."""


def request_of(number: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> Request:
    """Make request ``number``: for response ``sample`` to a prompt of ``step``."""
    # A prompt's further occurrences are seeded as further samples: the second has those from ``sampling.n`` on.
    seed = request_seed(sampling.seed, step, prompt.index, prompt.occurrence * sampling.n + sample)
    name = f"prompt {prompt.prompt_id!r}, sample {sample}"
    return Request(number, name, prompt.prompt_ids, sampling.of_sample(sample), seed, images=prompt.images)


def episode_request(number: int, prompt: Prompt, sample: int, sampling: Sampling, step: int) -> EpisodeRequest:
    """Make request ``number``: for an episode in place of response ``sample``."""
    first = request_of(number, prompt, sample, sampling, step)
    return EpisodeRequest(
        number, first.name, prompt.prompt_ids, sampling, first.seed, prompt, sample, step, images=prompt.images
    )


def request_seed(seed: int, step: int, prompt_index: int, sample: int) -> int:
    """Derive the seed of response ``sample`` to the prompt in row ``prompt_index`` at ``step``.

    It is the first 63 bits of BLAKE2b over the four numbers (little-endian int64, in the order of the arguments), so
    it is the same on every machine and Python version, and responses of neighbouring prompts, samples or steps are
    unrelated. Samples are counted over all occurrences of the row in the step. Nothing else enters it: a rollout depends
    neither on the engine that ran it nor on its neighbours in a batch.

    Raises:
        struct.error: an argument does not fit in a signed 64-bit integer.
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, prompt_index, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def sampling_of_batch(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling of batch ``number`` of a step. The first batch keeps the seed, later ones get other seeds.

    A data set smaller than the batches of a step gives a prompt again, which must not get the same responses.
    """
    return replace(sampling, seed=sampling.seed + (number << 32))


@dataclass(slots=True)
class ExpectedCompletions:
    """Matches each completion to its request, once, whatever the order in which they finish."""

    _requests: dict[int, Request] = field(default_factory=dict)
    _answered: set[int] = field(default_factory=set)

    def add(self, requests: Iterable[Request]) -> None:
        """Expect one completion for each request."""
        self._requests |= {request.request_id: request for request in requests}

    def match(self, completion: Completion) -> None:
        """Check that a completion answers a request, the first time, and may be trained on.

        Raises:
            LostTrajectory: the request was not made or has its completion.
            RuntimeError: see ``check_completion``.
        """
        request = self._requests.get(completion.request_id)
        if request is None:
            raise LostTrajectory(f"the engine answered request {completion.request_id}, which was not made. {REMEDY}")
        if completion.request_id in self._answered:
            raise LostTrajectory(f"the engine returned 2 completions for {request.name}. {REMEDY}")
        check_completion(request, completion)
        self._answered.add(completion.request_id)

    def refuse_missing(self) -> None:
        """Check that every request has its completion.

        Raises:
            LostTrajectory: some have none.
        """
        if self._answered != self._requests.keys():
            missing = [f"none for {r.name}" for r in self._requests.values() if r.request_id not in self._answered]
            raise LostTrajectory(
                f"the engine returned {len(self._answered)} completions for {len(self._requests)} requests: "
                f"{shortened(missing)}. {REMEDY}"
            )


@dataclass(frozen=True, slots=True)
class RolloutWorker:
    """Draws trajectories with this rank's engine."""

    generator: Generator
    engine: EngineRank
    decode: Decode
    make_request: MakeRequest = request_of
    wait: Callable[[], object] = lambda: None  # for all ranks, however long others sample; collective
    dealer: Dealer = field(default_factory=Dealer)

    def sample_step(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: int,
        finished: Callable[[int, list[Trajectory]], None] = lambda position, trajectories: None,
    ) -> list[tuple[int, Trajectory]]:
        """Draw this engine's share of the responses to the prompts of a whole step. Collective over the world.

        One engine, which ``dealer`` picks, draws all samples of a prompt, so that they share the prompt's cache. A prompt that comes
        again is numbered and gets other responses. ``finished`` gets the position of a prompt and its trajectories while those of
        others are still drawn.

        Returns:
            Each trajectory after the place of its prompt in ``prompts``, in the order of places and samples. Ranks that do not lead
            an engine get none.

        Raises:
            LostTrajectory: a response is missing, doubled, or was not asked for.
            RuntimeError: a response that must not be trained on.
        """
        numbered, take = number_occurrences(prompts), self.dealer.share(prompts, sampling.num_drawn, self.engine)
        expected = ExpectedCompletions()
        unfinished: dict[int, list[Completion]] = {}  # by the places of their prompts in the step
        groups: dict[int, list[Trajectory]] = {}
        while True:
            begun = [
                request
                for place in take(self.generator.num_in_flight)
                for request in self._make_requests([numbered[place]], sampling, step, place)
            ]
            if begun:
                expected.add(begun if self.engine.is_lead else [])
                self.generator.submit(begun)
            if not self.generator.num_in_flight:
                break
            for completion in self.generator.collect(math.inf):
                expected.match(completion)
                place = completion.request_id // sampling.num_drawn
                group = unfinished.setdefault(place, [])
                group.append(completion)
                if len(group) == sampling.num_drawn:
                    groups[place] = self._build_trajectories(numbered, unfinished.pop(place), sampling.num_drawn)
                    finished(place, groups[place])
        expected.refuse_missing()
        self.wait()
        return [(place, trajectory) for place in sorted(groups) for trajectory in groups[place]]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """Draw all responses to each prompt, in this order. Returns [] on ranks that do not lead their engine.

        Raises:
            LostTrajectory, RuntimeError: as ``sample_step``.
        """
        requests, expected = self._make_requests(prompts, sampling, step), ExpectedCompletions()
        expected.add(requests if self.engine.is_lead else [])
        completions = self.generator.generate(requests)
        for completion in completions:
            expected.match(completion)
        expected.refuse_missing()
        return self._build_trajectories(prompts, completions, sampling.num_drawn)

    def _make_requests(self, prompts: Sequence[Prompt], sampling: Sampling, step: int, first: int = 0) -> list[Request]:
        """Make the requests for all samples of prompts, of which the first has place ``first`` in the step.

        The id of a request is the place of its prompt times the number of samples, plus the sample.
        """
        samples = [(prompt, sample) for prompt in prompts for sample in range(sampling.num_drawn)]
        return [
            self.make_request(number, prompt, sample, sampling, step)
            for number, (prompt, sample) in enumerate(samples, first * sampling.num_drawn)
        ]

    def _build_trajectories(
        self, prompts: Sequence[Prompt], completions: Iterable[Completion], num_samples: int
    ) -> list[Trajectory]:
        """Build the trajectories of matched completions, in the order of their requests. ``prompts``: those that ids count."""
        ordered = sorted(completions, key=lambda completion: completion.request_id)
        asked = [divmod(completion.request_id, num_samples) for completion in ordered]
        return build_trajectories([(prompts[place], sample) for place, sample in asked], ordered, self.decode)


def build_trajectories(
    asked: Sequence[tuple[Prompt, int]], completions: Sequence[Completion], decode: Decode
) -> list[Trajectory]:
    """Build the trajectory of each completion. ``asked``: their prompts and samples. Episodes of several turns are whole already."""
    single = [completion.token_ids.tolist() for completion in completions if completion.trajectory is None]
    texts = iter(decode(single) if single else [])
    return [
        completion.trajectory or episode(prompt, sample, [completion], next(texts))
        for (prompt, sample), completion in zip(asked, completions, strict=True)
    ]


def check_completion(request: Request, completion: Completion) -> None:
    """Refuse what training must not see.

    Raises:
        RuntimeError: no token, more or fewer logprobs than tokens, a NaN, infinite or positive logprob, an unfinished request, or no
            support or one without its token. The message names the prompt.
    """
    tokens, logprobs, where = completion.token_ids, completion.logprobs, request.name
    if not len(tokens):
        raise RuntimeError(f"the engine returned no token for {where}")
    if len(logprobs) != len(tokens):
        raise RuntimeError(f"the engine returned {len(logprobs)} logprobs for {len(tokens)} tokens ({where})")
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > MAX_LOGPROB))
    if len(wrong):
        raise RuntimeError(f"the engine returned logprob {logprobs[wrong[0]]} at token {wrong[0]} of {where}")
    if request.sampling.records_support and completion.trajectory is None:
        _check_support(completion, where)
    if request.sampling.records_routes and completion.trajectory is None:
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
            f"the engine did not record which tokens top_p and top_k had left to draw from: {count} for {len(tokens)} tokens "
            f"({where}); set rollout.sampling.top_p=1 and top_k=-1"
        )
    is_own = support.values == tokens.repeat(support.counts)
    owners = np.arange(len(tokens)).repeat(support.counts)
    lacking = np.flatnonzero(np.bincount(owners[is_own], minlength=len(tokens)) != 1)
    if len(lacking):
        raise RuntimeError(f"the engine drew token {lacking[0]} of {where} from others than it recorded")


def number_occurrences(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Number the prompts of a step that hold the same row: each gets the count of those before it."""
    seen: Counter[int] = Counter()
    numbered = []
    for prompt in prompts:
        numbered.append(replace(prompt, occurrence=seen[prompt.index]) if seen[prompt.index] else prompt)
        seen[prompt.index] += 1
    return numbered
