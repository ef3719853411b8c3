"""A character tokenizer with a chat template, an engine with scripted answers, and rollout functions on it."""

from __future__ import annotations

import string
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf_mcore.coroutines import run
from rlhf_mcore.environments.function import FunctionRollout, InProcessSessions
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.sampling.engine_loop import EngineLoop
from rlhf_mcore.sampling.rollouts import LocalPlayer, RolloutLimits, RolloutSetup
from rlhf_mcore.types import Completion, Job, Prompt, Request, Sampling, Trajectory

SPECIAL = ["<unk>", "<end>", "<user>", "<assistant>", "<tool>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content + '<end>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer(SPECIAL, "<end>", CHAT_TEMPLATE)


def character_tokenizer(special: Sequence[str], end: str, template: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer of letters and special tokens. The first special token replaces unknown characters."""
    vocabulary = {word: number for number, word in enumerate([*special, *string.printable])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(special))
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token=special[0], eos_token=end)
    fast.chat_template = template
    return fast


def play_jobs(engine: Scripted, setup: RolloutSetup, jobs: Sequence[Job], slots: int | None = None) -> list[Trajectory]:
    """Run the rollouts of jobs on an engine."""
    loop = engine.loop = EngineLoop(
        engine, in_order=setup.in_order, until_finished=setup.in_order, slots=slots, places=setup.places
    )

    async def play() -> list[Trajectory]:
        return await loop.join(LocalPlayer(loop, lambda rows: [""] * len(rows), setup).begin(jobs))

    return run(loop.run(play()))


class Scripted:
    """A StepwiseEngine. ``says`` returns the text of a turn, given the whole prompt and the seed. The end token follows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, says: Callable[[str, int], str]) -> None:
        self.loop: EngineLoop
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self._tokenizer, self._says, self._in_flight = tokenizer, says, list[Request]()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self._in_flight += requests

    def step(self) -> list[Completion]:
        """Complete the first request in flight."""
        if not self._in_flight:
            return []
        request = self._in_flight.pop(0)
        text = self._tokenizer.decode(request.prompt_ids)
        said = self._says(text, request.seed) + "<end>"
        ids = self._tokenizer(said, add_special_tokens=False)["input_ids"]
        limit = request.sampling.max_new_tokens
        reason = "length" if len(ids) > limit else "stop"
        ids = np.array(ids[:limit], np.int32)
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
        versions = ((0, 2 + text.count("<assistant>")),)  # each turn has a newer policy version
        return [Completion(request.request_id, ids, logprobs, versions, reason, num_cached=4)]

    def forget_prefixes(self) -> None: ...

    def compare_ranks(self) -> None: ...

    def sampled_tokens(self, request_ids: Collection[int]) -> dict[int, list[int]]:
        return {}

    def cancel(self, request_ids: Collection[int]) -> None:
        self.cancelled += [request.request_id for request in self._in_flight if request.request_id in request_ids]
        self._in_flight = [request for request in self._in_flight if request.request_id not in request_ids]


DOCUMENTS = ["the Loire is long", "the Seine is 120 m wide"]
Play = Callable[..., list[Trajectory]]


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def play(tokenizer: PreTrainedTokenizerBase, tokenizer_dir: str) -> Play:
    """Run a rollout function on prompts. ``says``: the turns in the order of the engine's requests, or a function."""

    def play(
        function: Any,
        says: Any,
        *,
        n: int = 1,
        new: int = 20,
        texts: Sequence[str] = ("<user>q<end><assistant>",),
        fails: bool = True,
        branches: str = "all",
        **limits: Any,
    ) -> list[Trajectory]:
        said = iter(()) if callable(says) else iter(says)
        play.engine = Scripted(tokenizer, says if callable(says) else lambda text, seed: next(said))  # type: ignore[attr-defined]
        options = {"function": OwnFunction(function), "tokenizer": tokenizer_dir, "template": "auto", "keep": False}
        rollout = FunctionRollout(
            InProcessSessions("rollout.function=f", options), TurnText(tokenizer), fails, branches
        )
        setup = RolloutSetup(rollout, RolloutLimits(**{"max_turns": 5, "max_tokens": 100, "max_total": 200, **limits}))
        sampling = Sampling(n=n, max_new_tokens=new, seed=7)
        jobs = []
        for place, text in enumerate(texts):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            row: dict[str, Any] = {"ground_truth": "42", "extra_info": {"documents": DOCUMENTS}}
            prompt = Prompt(f"p{place}", place, ids, text, **row, question="the question")
            jobs += [Job(len(jobs) + sample, prompt, sample, sampling, 3) for sample in range(n)]
        return play_jobs(play.engine, setup, jobs)  # type: ignore[attr-defined]

    return play
