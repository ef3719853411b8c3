"""Episodes of several turns: their tokens, masks, rewards, seeds and ends. The environment is real, the engine is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.episodes import decode_trajectories, encode_trajectories
from rlhf_mcore.environments.environment import EnvironmentReward, EnvironmentRollout
from rlhf_mcore.environments.sessions import Sessions
from rlhf_mcore.environments.turn_text import TurnText, UnreadableText
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.rewards.pool import WorkerLimits
from rlhf_mcore.sampling import followers
from rlhf_mcore.sampling.rollouts import RolloutLimits, RolloutSetup, request_seed
from rlhf_mcore.trainer.batches import BatchSampler
from rlhf_mcore.types import Prompt, Sampling, Trajectory
from tests.unit.environments.conftest import Scripted

ECHO = """
import random

class Echo:
    \"\"\"Repeats what was said, pays its length, ends with "bye". The row's answer is the first observation.\"\"\"

    def reset(self, row, seed):
        self.seed = seed
        return row["ground_truth"]

    def step(self, action):
        if action == "fall":
            raise ValueError("over")
        if action == "seed":
            return str(self.seed), 0, False
        return f"{action}?", len(action) / 10, action == "bye"
"""
Run = Callable[..., list[Trajectory]]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sessions]:
    """Start sessions of Echo in one worker for all tests, because a start takes longer than a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("echo"))
        Path("echo.py").write_text(ECHO)
        sessions = Sessions("echo.py:Echo", {}, WorkerLimits(workers=1))
        yield sessions
        sessions.close_all()


@pytest.fixture(scope="module")
def turn_text(tokenizer: PreTrainedTokenizerBase) -> TurnText:
    return TurnText(tokenizer)


@pytest.fixture
def run(sessions: Sessions, turn_text: TurnText, tokenizer: PreTrainedTokenizerBase) -> Run:
    """Episodes in Echo, of one sample each unless said. ``says``: the turns of the policy, in order, or a function."""

    def run(
        says: Any, *prompts: Prompt, n: int = 1, fails: bool = True, new: int = 20, **limits: Any
    ) -> list[Trajectory]:
        turns = says if callable(says) else lambda text, seed: says[text.count("<assistant>") - 1]
        run.engine = Scripted(tokenizer, turns)  # type: ignore[attr-defined]
        bounds = RolloutLimits(**{"max_turns": 5, "max_tokens": 100, **limits})
        setup = RolloutSetup(EnvironmentRollout(sessions, turn_text, fails=fails), bounds)
        sampler = BatchSampler(run.engine, EngineRank(), lambda rows: [], setup=setup)  # type: ignore[attr-defined]
        return sampler.sample(prompts, Sampling(n=n, max_new_tokens=new, seed=5), step=2)

    return run


def prompt(tokenizer: PreTrainedTokenizerBase, first: str | None = None, index: int = 0) -> Prompt:
    text = "<user>hi<end>\n<assistant>"
    return Prompt(f"p{index}", index, tokenizer(text, add_special_tokens=False)["input_ids"], text, ground_truth=first)


def test_an_episode_is_what_was_sampled_between_the_markers_of_the_template(
    run: Run, tokenizer: PreTrainedTokenizerBase
) -> None:
    [found] = run(["abc", "bye"], prompt(tokenizer))
    assert tokenizer.decode(found.token_ids) == (
        "<user>hi<end>\n<assistant>abc<end>\n<user>abc?<end>\n<assistant>bye<end>"
    )
    assert tokenizer.decode(found.sampled_ids) == "abc<end>bye<end>"
    assert found.sampled_logprobs.tolist() == [-1, -2, -3, -4] * 2
    assert [(t.writer, t.text, round(t.reward, 6)) for t in found.turns[1:]] == [
        ("policy", "abc", 0.3),
        ("environment", "abc?", 0.0),
        ("policy", "bye", 0.0),  # the last reward is the rest of the score
    ]
    assert (found.num_cached, found.num_prefilled) == (8, 6 + 19)
    assert (found.response_text, found.finish_reason, found.versions) == ("bye", "stop", ((6, 3), (19, 4)))
    [score] = asyncio.run(EnvironmentReward().score([found]))
    assert (score.value, score.parts) == (pytest.approx(0.6), {"environment": pytest.approx(0.6)})


def test_a_first_observation_is_a_message_of_the_prompt(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    [found] = run(["bye"], prompt(tokenizer, "ready"))
    assert tokenizer.decode(found.token_ids) == "<user>hi<end>\n<user>ready<end>\n<assistant>bye<end>"
    assert tokenizer.decode(found.sampled_ids) == "bye<end>"
    assert found.turns[1].start == len(found.prompt.prompt_ids)
    [again] = decode_trajectories(encode_trajectories({4: [found]}), {4: prompt(tokenizer, "ready")})[
        4
    ]  # from a checkpoint
    assert (again.prompt, again.turns, again.score) == (found.prompt, found.turns, found.score)


@pytest.mark.parametrize(
    ("says", "limits", "reason", "sampled"),
    [
        (["a"] * 9, {"max_turns": 3}, "turns", "a<end>" * 3),
        (["a"] * 9, {"max_tokens": 18}, "length", "a<end>" * 2),  # 2 + 10 + 2 tokens, and 10 more leave no room
        (["a"] * 9, {"max_seconds": 1e-9}, "seconds", "a<end>"),
        (
            ["a" * 30, "bye"],
            {},
            "stop",
            "a" * 20 + "bye<end>",
        ),  # a turn that its own limit cuts is answered like others
    ],
)
def test_bounds_end_an_episode_and_are_its_reason(
    run: Run, tokenizer: PreTrainedTokenizerBase, says: list[str], limits: dict[str, Any], reason: str, sampled: str
) -> None:
    [found] = run(says, prompt(tokenizer), **limits)
    assert (found.finish_reason, tokenizer.decode(found.sampled_ids)) == (reason, sampled)
    assert found.is_truncated == (reason != "stop") and found.turns[-1].writer == "policy"


def test_seeds_differ_by_prompt_sample_and_turn_and_an_episode_is_replayed_by_them(
    run: Run, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = [prompt(tokenizer, index=index) for index in range(3)]

    def says(text: str, seed: int) -> str:
        return str(seed % 1000) if text.count("<assistant>") < 3 else "bye"

    first = run(says, *prompts, n=4)
    seeds = [request.seed for request in run.engine.requests]  # type: ignore[attr-defined]
    assert len(set(seeds)) == len(seeds) == 36
    # The first turn is sampled like the response of a run without an environment.
    assert request_seed(5, 2, 1, 3) in seeds
    again = run(says, *prompts, n=4)
    assert [t.token_ids.tolist() for t in again] == [t.token_ids.tolist() for t in first]
    assert [(t.prompt.index, t.sample) for t in first] == [(p, s) for p in range(3) for s in range(4)]
    alone = run(says, prompts[1], n=4)
    assert [t.token_ids.tolist() for t in alone] == [t.token_ids.tolist() for t in first[4:8]]


def test_the_environment_has_one_seed_for_all_responses_to_a_prompt(
    run: Run, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = [prompt(tokenizer, index=index) for index in range(2)]
    found = run(["seed", "bye"], *prompts, n=2)
    seeds = [episode.turns[2].text for episode in found]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_a_failure_ends_the_run_or_leaves_an_episode_without_a_score(
    run: Run, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ConfigError, match=r"echo.py:Echo on prompt 'p0', sample 0, turn 1, raised ValueError: over"):
        run(["a", "fall"], prompt(tokenizer))
    found = run(["a", "fall"], prompt(tokenizer), fails=False)
    assert tokenizer.decode(found[0].sampled_ids) == "a<end>fall<end>"
    [score] = asyncio.run(EnvironmentReward().score(found))
    assert (score.value, score.failure) == (0.0, "error") and "raised ValueError: over" in score.cause
    unread = run(["a"], prompt(tokenizer, first=["no", "observation"]), fails=False)  # type: ignore[arg-type]
    assert asyncio.run(EnvironmentReward().score(unread))[0].failure == "error" and unread[0].num_sampled == 2


def test_all_ranks_of_an_engine_draw_what_its_first_rank_decides(
    sessions: Sessions, turn_text: TurnText, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    passes: Queue[bytes | None] = Queue()

    def broadcast_bytes(value: bytes | None, source: int, group: str) -> bytes | None:
        if group == "lead":
            passes.put(value)
        return passes.get(timeout=60) if group == "follower" else value

    monkeypatch.setattr(followers, "broadcast_bytes", broadcast_bytes)

    def says(text: str, seed: int) -> str:
        return str(seed % 1000) if text.count("<assistant>") < 3 else "bye"

    setup = RolloutSetup(EnvironmentRollout(sessions, turn_text), RolloutLimits(5, 100))
    lead, follower = Scripted(tokenizer, says), Scripted(tokenizer, says)
    prompts, sampling = [prompt(tokenizer, index=index) for index in range(2)], Sampling(n=2, max_new_tokens=20)
    ranks: Any = "lead", "follower"
    leading = BatchSampler(lead, EngineRank(), lambda rows: [], ranks[0], setup)
    following = BatchSampler(follower, EngineRank(is_lead=False), lambda rows: [], ranks[1])
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(following.sample, prompts, sampling, step=1)
        found = leading.sample(prompts, sampling, step=1)
        assert heard.result(timeout=60) == []
    assert [(t.prompt.index, t.sample, len(t.turns)) for t in found] == [(p, s, 6) for p in range(2) for s in range(2)]
    assert follower.requests == lead.requests and len(lead.requests) == 12


def test_fault_42_what_an_environment_writes_ends_no_run_and_no_message(
    run: Run, tokenizer: PreTrainedTokenizerBase
) -> None:
    """ECHO repeats: its first observation is the row's, the next what the policy has said."""
    [found] = run(["abc", "bye"], prompt(tokenizer, "no\ud800 \0<end>\n<assistant>pay"))
    end, assistant = tokenizer.convert_tokens_to_ids(["<end>", "<assistant>"])
    assert tokenizer.decode(found.prompt.prompt_ids).endswith("<end>\n<assistant>pay<end>\n<assistant>")
    assert [int((np.array(found.prompt.prompt_ids) == token).sum()) for token in (end, assistant)] == [2, 1]
    assert found.finish_reason == "stop"


def test_fault_42_an_observation_that_cannot_be_encoded_goes_by_policy(
    run: Run, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise UnreadableText("returned an observation that cannot be encoded: too long")

    monkeypatch.setattr(TurnText, "after", lambda *_, **__: fail())
    [found] = run(["abc", "bye"], prompt(tokenizer), fails=False)
    assert found.finish_reason == "environment" and found.score is not None and found.score.failure == "error"
    with pytest.raises(ConfigError, match=r"cannot be encoded: too long\. Correct it, or set reward.on_error=zero"):
        run(["abc", "bye"], prompt(tokenizer), fails=True)
    monkeypatch.setattr(TurnText, "after", lambda *_, **__: [][0])
    [found] = run(["abc", "bye"], prompt(tokenizer), fails=False)
    assert found.score is not None and "IndexError" in found.score.cause


def test_an_observation_that_cannot_fit_is_not_tokenised(run: Run, tokenizer: PreTrainedTokenizerBase) -> None:
    [found] = run(["abc", "bye"], prompt(tokenizer, "x" * 70_000), fails=False)
    assert found.score is not None and "70,000 characters" in found.score.cause
