"""Rollout functions: their turns, branches, seeds, limits and results. The function is real, the engine is scripted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.coroutines import run as run_coroutine
from rlhf_mcore.environments.function import ReturnedReward
from rlhf_mcore.environments.function_worker import load_rollout
from rlhf_mcore.sampling.rollouts import request_seed, turn_seed
from rlhf_mcore.types import Score, Trajectory
from tests.unit.environments.conftest import DOCUMENTS, Play


def parts_of(episode: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    return [(turn.writer, str(tokenizer.decode(episode.token_ids[turn.start : turn.stop]))) for turn in episode.turns]


def test_turns_and_added_tokens_become_one_sequence(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    seen: dict[str, Any] = {}

    async def search(policy: Any, prompt: Any, ctx: Any) -> None:
        seen.update(prompt=prompt, seed=ctx.seed)
        tokens = list(prompt.tokens)
        while True:
            turn = await policy.sample(tokens)
            seen.setdefault("turns", []).append(turn)
            tokens += turn.tokens
            if "?" not in turn.text:
                return
            await asyncio.sleep(0.001)  # a tool
            tokens += ctx.tokenize("<end>42")  # written by a tool, so it is not the end token

    [episode] = play(search, ["6*7?", "it is 42"])
    assert parts_of(episode, tokenizer) == [
        ("prompt", "<user>q<end><assistant>"),
        ("policy", "6*7?<end>"),
        ("environment", "<end>42"),
        ("policy", "it is 42<end>"),
    ]
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert (episode.token_ids == end).sum() == 3  # one in the prompt and one per turn
    assert episode.response_text == "it is 42" and episode.finish_reason == "stop" and episode.score is None
    assert episode.loss_mask.sum() == sum(len(turn.tokens) for turn in seen["turns"])
    assert [turn.logprobs[0] for turn in seen["turns"]] == [-1.0, -1.0]
    assert [turn.finish_reason for turn in seen["turns"]] == ["stop", "stop"]
    prompt = seen["prompt"]
    assert (prompt.answer, prompt.row["extra_info"], prompt.images) == ("42", {"documents": DOCUMENTS}, [])
    assert prompt.messages == [{"role": "user", "content": "the question"}]
    first = request_seed(7, 3, 0, 0)
    assert [request.seed for request in play.engine.requests] == [first, turn_seed(first, 1)]  # type: ignore[attr-defined]
    assert seen["seed"] == request_seed(7, 3, 0, -1)
    assert episode.record is not None and [node["parent"] for node in episode.record["nodes"]] == [None, 0]


def test_gathered_samples_are_branches_in_program_order(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    async def best(policy: Any, prompt: Any, ctx: Any) -> dict[str, Any]:
        async def think() -> Any:
            await asyncio.sleep(0)
            return await policy.sample(prompt.tokens)

        turns = await asyncio.gather(think(), policy.sample(prompt.tokens), think())
        chosen = max(turns, key=lambda turn: turn.text)
        last = await policy.sample([*prompt.tokens, *chosen.tokens, *ctx.tokenize("ok")])
        return {"reward": len(last.text), "parts": {"tries": len(turns)}}

    says = {}

    def say(text: str, seed: int) -> str:
        return says.setdefault(seed, "abc"[len(says)] if len(says) < 3 else "last")

    [episode] = play(best, say)
    first = request_seed(7, 3, 0, 0)
    requests = play.engine.requests  # type: ignore[attr-defined]
    assert [request.seed for request in requests] == [first, *(turn_seed(first, turn) for turn in (1, 2, 3))]
    assert episode.score == Score(4.0, {"rollout": 4.0, "rollout.tries": 3.0})
    texts = parts_of(episode, tokenizer)
    assert [text for writer, text in texts if writer == "policy"] == ["a<end>", "b<end>", "c<end>", "last<end>"]
    assert len(episode.sequences) == 3 and episode.sequences[2] > episode.sequences[0]
    assert episode.loss_mask.sum() == sum(map(len, ["ax", "bx", "cx", "lastx"]))


def test_a_changed_history_starts_a_branch_whose_old_turns_are_not_trained_twice(
    play: Play, tokenizer: PreTrainedTokenizerBase
) -> None:
    async def forget(policy: Any, prompt: Any, ctx: Any) -> float:
        first = await policy.sample(prompt.tokens)
        second = await policy.sample([*prompt.tokens, *first.tokens, *ctx.tokenize("x")])
        await policy.sample([*ctx.tokenize("new "), *second.tokens])  # not its own turn, but text
        return 1.0

    [episode] = play(forget, ["one", "two", "three"])
    assert parts_of(episode, tokenizer) == [
        ("prompt", "<user>q<end><assistant>"),
        ("policy", "one<end>"),
        ("environment", "x"),
        ("policy", "two<end>"),
        ("prompt", "new two<end>"),
        ("policy", "three<end>"),
    ]
    assert episode.loss_mask.sum() == len("onex") + len("twox") + len("threex")


@pytest.mark.parametrize("branches", ["last", "longest"])
def test_only_chosen_branches_are_trained(play: Play, branches: str) -> None:
    async def two(policy: Any, prompt: Any, ctx: Any) -> float:
        await asyncio.gather(policy.sample(prompt.tokens), policy.sample(prompt.tokens))
        return 1.0

    [episode] = play(two, ["longer", "short"], branches=branches)
    assert episode.loss_mask.sum() == {"last": len("shortx"), "longest": len("longerx")}[branches]
    assert episode.sequences == ()


def test_a_turn_ends_after_its_stop_text(play: Play) -> None:
    seen = []

    async def stop(policy: Any, prompt: Any, ctx: Any) -> float:
        seen.append(await policy.sample(prompt.tokens, stop=("</s>", "never")))
        seen.append(await policy.sample(prompt.tokens + seen[0].tokens, stop="zz", max_tokens=3))
        return 1.0

    [episode] = play(stop, ["<s>q</s> and more", "more than three"])
    assert [(turn.text, turn.finish_reason) for turn in seen] == [("<s>q</s>", "stop"), ("mor", "length")]
    assert len(seen[0].tokens) == len(seen[0].logprobs) == len("<s>q</s>")
    assert episode.loss_mask.sum() == len("<s>q</s>") + 3
    assert episode.finish_reason == "stop"  # the function chose these lengths


def test_a_rollout_of_one_cut_response_is_truncated(play: Play) -> None:
    async def single(policy: Any, prompt: Any, ctx: Any) -> None:
        await policy.sample(prompt.tokens)

    [episode] = play(single, ["too long for it"], new=4)
    assert (episode.finish_reason, episode.score, episode.loss_mask.sum()) == ("length", None, 4)


@pytest.mark.parametrize(
    ("limits", "reason", "turns"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_seconds": 0.0}, "seconds", 0),
        ({"max_tokens": 9}, "length", 2),
        ({"max_total": len("uqea") + 9}, "length", 2),
    ],
)
@pytest.mark.parametrize("catches", [False, True])
def test_limits_end_the_function_unless_it_catches_them(
    play: Play, limits: dict[str, Any], reason: str, turns: int, catches: bool
) -> None:
    async def long(policy: Any, prompt: Any, ctx: Any) -> float:
        tokens = list(prompt.tokens)
        try:
            while True:
                tokens += (await policy.sample(tokens)).tokens
        except policy.LimitReached as limit:
            if not catches:
                raise
            return len(str(limit)) / 10

    if not turns:  # a trajectory needs a turn
        with pytest.raises(ConfigError, match="ended without a turn of the policy"):
            play(long, lambda text, seed: "four", **limits)
        return
    [episode] = play(long, lambda text, seed: "four", **limits)
    assert sum(turn.writer == "policy" for turn in episode.turns) == turns
    if catches:
        assert episode.score == Score(len(reason) / 10, {"rollout": len(reason) / 10})
    else:
        assert episode.finish_reason == reason and episode.is_truncated and episode.score is None


async def raises(policy: Any, prompt: Any, ctx: Any) -> None:
    await policy.sample(prompt.tokens)
    raise KeyError("lost")


async def exits(policy: Any, prompt: Any, ctx: Any) -> None:
    raise SystemExit(3)


async def says_nothing(policy: Any, prompt: Any, ctx: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "cause", "turns"),
    [
        (raises, "after 1 turn, raised KeyError: 'lost'", 1),
        (exits, "after 0 turns, called sys.exit(3)", 1),
        (says_nothing, "after 0 turns, ended without a turn of the policy", 1),
    ],
)
def test_a_function_that_fails_ends_the_run_or_scores_0(play: Play, function: Any, cause: str, turns: int) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.function=f on prompt 'p0', sample 0, ") as error:
        play(function, lambda text, seed: "turn")
    assert cause in str(error.value) and "reward.on_error=zero" in str(error.value)
    [episode] = play(function, lambda text, seed: "turn", fails=False)
    assert episode.score is not None and episode.score.failure == "error" and cause in episode.score.cause
    assert episode.finish_reason == "environment" and sum(turn.writer == "policy" for turn in episode.turns) == turns


@pytest.mark.parametrize(
    "result",
    [
        "1",
        float("nan"),
        {"score": 1.0},
        {"reward": None},
        {"reward": 1.0, "parts": {"a": "b"}},
        {"reward": 1.0, "more": 2},
        [1.0],
    ],
    ids=str,
)
def test_results_that_are_no_scores_are_rejected(play: Play, result: Any) -> None:
    async def rubbish(policy: Any, prompt: Any, ctx: Any) -> Any:
        await policy.sample(prompt.tokens)
        return result

    with pytest.raises(ConfigError, match="after 1 turn, returned"):
        play(rubbish, ["turn"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda policy, prompt: policy.sample([]), "tokens is empty"),
        (lambda policy, prompt: policy.sample([*prompt.tokens, 10**6]), "token 1000000 is not in the vocabulary"),
        (lambda policy, prompt: policy.sample("text"), "'str' object cannot be interpreted as an integer"),
        (lambda policy, prompt: policy.sample(prompt.tokens, images=["a.png"]), "the model reads no images"),
        (lambda policy, prompt: policy.sample(prompt.tokens, max_tokens=0.5), "cannot be interpreted as an integer"),
    ],
)
def test_invalid_requests_raise_in_the_function(play: Play, call: Any, message: str) -> None:
    errors = []

    async def wrong(policy: Any, prompt: Any, ctx: Any) -> float:
        try:
            await call(policy, prompt)
        except (ValueError, TypeError) as error:
            errors.append(str(error))
        await policy.sample(prompt.tokens)
        return 1.0

    play(wrong, ["turn"])
    assert len(errors) == 1 and message in errors[0]


def test_messages_follow_the_chat_template(play: Play, tokenizer: PreTrainedTokenizerBase) -> None:
    async def talk(policy: Any, prompt: Any, ctx: Any) -> float:
        start = ctx.tokenize_messages([{"role": "user", "content": "hi<end>"}])
        turn = await policy.sample(start)
        await policy.sample([*start, *turn.tokens, *ctx.tokenize_messages([{"role": "tool", "content": "42"}], turn)])
        return 1.0

    [episode] = play(talk, ["first", "second"])
    assert parts_of(episode, tokenizer) == [
        ("prompt", "<user>hi<end><end>\n<assistant>"),
        ("policy", "first<end>"),
        ("environment", "\n<tool>42<end>\n<assistant>"),
        ("policy", "second<end>"),
    ]
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert (episode.token_ids == end).sum() == 4  # not the text of the user


def test_the_engine_waits_for_all_functions_so_slow_tools_change_nothing(play: Play) -> None:
    def requests(delays: Callable[[], float]) -> list[tuple[int, int]]:
        async def slow(policy: Any, prompt: Any, ctx: Any) -> float:
            async def take_turns() -> None:
                tokens = list(prompt.tokens)
                for _ in range(2):
                    tokens += (await policy.sample(tokens)).tokens

            await asyncio.sleep(delays())
            await asyncio.gather(take_turns(), take_turns())
            await asyncio.sleep(delays())
            await policy.sample(prompt.tokens)
            return 1.0

        passes: list[tuple[int, int]] = []

        def say(text: str, seed: int) -> str:
            passes.append((seed, len(play.engine.requests)))  # type: ignore[attr-defined]
            return "turn"

        play(slow, say, n=2, texts=("<user>a<end><assistant>", "<user>b<end><assistant>"))
        return passes

    assert requests(lambda: random.random() / 50) == requests(lambda: 0.0)


def test_graders_score_only_the_rollouts_without_a_score(tokenizer: PreTrainedTokenizerBase) -> None:
    async def score(trajectories: Any) -> list[Score]:
        return [Score(float(len(each.response_text))) for each in trajectories]

    def of(text: str, own: Score | None) -> Any:
        return SimpleNamespace(response_text=text, score=own)

    failed = Score(0.0, failure="error")
    given = [of("abc", None), of("", Score(9.0)), of("", failed), of("a", None)]
    scores = run_coroutine(ReturnedReward(SimpleNamespace(score=score)).score(given))  # type: ignore[arg-type]
    assert scores == [Score(3.0), Score(9.0), failed, Score(1.0)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(policy, prompt, ctx): ...", "is not a coroutine function; write async def f("),
        ("async def f(policy): ...", "its parameters are (policy)"),
        ("f = 3", "is not a function"),
        ("import nowhere_at_all", "fails to import"),
    ],
)
def test_a_wrong_function_is_refused_when_it_is_loaded(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(ConfigError) as error:
        load_rollout(f"{tmp_path}/own.py:f")
    assert "rollout.function" in str(error.value) and message in str(error.value)


def test_task_seed_is_shared_by_the_samples_of_a_prompt(play: Play) -> None:
    seeds = []

    async def note(policy: Any, prompt: Any, ctx: Any) -> float:
        seeds.append(ctx.seed)
        await policy.sample(prompt.tokens)
        return 1.0

    play(note, lambda text, seed: "turn", n=2, texts=("<user>a<end><assistant>", "<user>b<end><assistant>"))
    assert seeds[0] == seeds[1] != seeds[2]
