"""Rollout functions in real worker processes: their view of the machine, and the loss of their process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.choices import ROLLOUT
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.function import FunctionRollout
from rlhf_mcore.environments.sessions import Sessions
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.rewards.pool import WorkerLimits
from rlhf_mcore.sampling.rollouts import RolloutLimits, RolloutSetup
from rlhf_mcore.types import Job, Prompt, Sampling, Trajectory
from tests.unit.environments.conftest import Scripted, play_jobs, tokenizer

__all__ = ["tokenizer"]

FUNCTION = """
import asyncio, os, random, time
from pathlib import Path

async def rollout(policy, prompt, ctx):
    with open("starts", "a") as file:
        file.write(f"{prompt.answer}\\n")
    first = await policy.sample(prompt.tokens)
    await globals()[prompt.answer]()
    tokens = [*prompt.tokens, *first.tokens, *map(ord, str(random.Random(ctx.seed).random()))]
    await asyncio.gather(policy.sample(tokens), policy.sample(tokens))
    return {"reward": 1.0, "parts": {"secret": float("SECRET" in os.environ), "parent": os.getppid()}}

async def fine():
    await asyncio.sleep(0.01)

async def is_killed_once():
    if not Path("killed").exists():
        Path("killed").touch()
        os._exit(1)

async def exits():
    os._exit(1)

async def hangs():
    await asyncio.sleep(1000)

async def blocks():
    time.sleep(1000)

async def fills():
    bytearray(2**40)
"""
Play = Callable[..., list[Trajectory]]


@pytest.fixture
def play(tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Run FUNCTION for each kind, in one worker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "1")
    Path("own.py").write_text(FUNCTION)
    options = {"function": "own.py:rollout", "tokenizer": None, "template": "auto", "keep": False}
    sessions = Sessions(ROLLOUT, options, WorkerLimits(workers=1, timeout_s=3))
    sessions.name = "rollout.function=own.py:rollout"

    def play(*kinds: str, fails: bool = False, slow_s: float = 0.0) -> list[Trajectory]:
        def say(text: str, seed: int) -> str:
            time.sleep(slow_s)
            return f"turn {seed % 100}"

        play.engine = Scripted(tokenizer, say)  # type: ignore[attr-defined]
        ids = tokenizer("<user>q<end><assistant>", add_special_tokens=False)["input_ids"]
        prompts = [Prompt(f"p{place}", place, ids, "q", ground_truth=kind) for place, kind in enumerate(kinds)]
        jobs = [Job(place, prompt, 0, Sampling(max_new_tokens=20, seed=7), 1) for place, prompt in enumerate(prompts)]
        setup = RolloutSetup(FunctionRollout(sessions, TurnText(tokenizer), fails), RolloutLimits(5, 200, None, 400))
        return play_jobs(play.engine, setup, jobs)  # type: ignore[attr-defined]

    yield play
    sessions.close_all()


def test_functions_share_a_process_without_credentials_and_time_of_the_engine_does_not_count(play: Play) -> None:
    found = play("fine", "fine", slow_s=1.0)  # 6 turns take more than the 3 s of a step
    for episode in found:
        assert episode.score is not None and episode.score.parts["rollout.secret"] == 0
        assert len(episode.sequences) == 2 and episode.finish_reason == "stop"


def test_fault_25_a_killed_worker_is_replaced_and_no_turn_is_sampled_twice(play: Play) -> None:
    undisturbed = play("fine", "fine")
    seeds = [request.seed for request in play.engine.requests]  # type: ignore[attr-defined]
    found = play("is_killed_once", "fine")
    assert [request.seed for request in play.engine.requests] == seeds  # type: ignore[attr-defined]
    for episode, usual in zip(found, undisturbed, strict=True):
        assert episode.token_ids.tolist() == usual.token_ids.tolist()
        assert episode.logprobs.tolist() == usual.logprobs.tolist()
    assert Path("starts").read_text().split() == ["fine", "fine", "is_killed_once", "fine", "is_killed_once", "fine"]


@pytest.mark.parametrize(
    ("kind", "failure", "cause"),
    [
        ("exits", "error", "ended its process with exit code 1"),
        ("hangs", "timeout", "gave no answer within environment.timeout_s=3 s"),
        ("blocks", "timeout", "gave no answer within environment.timeout_s=3 s"),
        ("fills", "error", "ran out of memory (environment.memory_gib=8)"),
    ],
)
def test_fault_24_and_25_only_the_guilty_function_fails(play: Play, kind: str, failure: str, cause: str) -> None:
    guilty, other = play(kind, "fine")
    assert guilty.score is not None and (guilty.score.value, guilty.score.failure) == (0.0, failure)
    assert guilty.finish_reason == "environment" and [turn.writer for turn in guilty.turns] == ["prompt", "policy"]
    expected = f"rollout.function=own.py:rollout on prompt 'p0', sample 0, after 1 turn, {cause}"
    assert guilty.score.cause.startswith(expected), guilty.score.cause
    assert other.score is not None and other.score.value == 1.0
    assert os.getpid() == other.score.parts["rollout.parent"]


def test_an_error_names_the_line_and_the_remedy(play: Play) -> None:
    with pytest.raises(ConfigError, match=r"reward\.on_error=zero") as error:
        play("nowhere", fails=True)
    assert "raised KeyError: 'nowhere' (own.py, line 9)" in str(error.value)
