"""Run multi-turn episodes in real trainings: on an engine of two ranks, on disaggregated engines, and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.sandbox.run import machine_level
from tests.commands import ROOT, run_command, start_command
from tests.metric_names import assert_registered

TRAIN = [sys.executable, "-m", "rlhf_mcore.cli.train"]
SMALL = [
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=4",
    "rollout.sampling.n=4",
    "evaluate.max_prompts=4",
    "logging.trackers=[]",
    "logging.rollouts_every=1",
    "logging.console=plain",
    "deterministic=true",
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def fit(folder: Path, kind: str, steps: int) -> Path:
    """Make the model and the tasks of an environment, fitted for a few steps."""
    tool = [sys.executable, str(ROOT / "tools" / "make_environments.py"), kind, "--out", kind]
    made = run_command([*tool, "--fit-steps", str(steps)], folder)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def guess(workspace: Path) -> Path:
    """Return a workspace with the model of the environment ``guess``."""
    return fit(workspace, "guess", 40)


@pytest.fixture(scope="module")
def calculator(workspace: Path) -> Path:
    """Return a workspace with the model of the environment ``calculator``."""
    return fit(workspace, "calculator", 90)


def command(config: str, name: str, *settings: str) -> list[str]:
    """Return the command of a small training."""
    return [*TRAIN, str(ROOT / "configs" / "quickstart" / f"{config}.yaml"), *SMALL, f"experiment={name}", *settings]


def train(folder: Path, config: str, name: str, *settings: str) -> Path:
    """Run a training and return its directory."""
    done = run_command(command(config, name, *settings), folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "outputs" / "quickstart" / name


def rollouts(run: Path) -> list[dict[str, Any]]:
    """Return the recorded rollouts of all steps."""
    files = sorted((run / "rollouts").glob("step-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def mean_rewards(run: Path) -> list[float]:
    """Return the mean reward of each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


HF = ["rollout.engine=hf", "evaluate.every=0", "actor.optimizer.schedule.total_updates=3"]
WEIGHTS = Path("checkpoint-3") / "actor" / "model.safetensors"


@pytest.fixture(scope="module")
def whole(guess: Path) -> Path:
    """A run of three steps with the environment ``guess``."""
    return train(guess, "guess", "whole", *HF, "trainer.num_steps=3")


def test_stopped_and_resumed_on_an_engine_of_its_own_a_run_is_the_synchronous_one_bit_for_bit(
    guess: Path, whole: Path
) -> None:
    for steps in (2, 3):
        apart = train(guess, "guess", "apart", *HF, "rollout.placement=disaggregated", f"trainer.num_steps={steps}")
    found, usual = rollouts(apart), rollouts(whole)
    assert len(usual) == 3 * 16 and found == usual
    assert (apart / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    for record in usual:
        turns = record["turns"]
        assert [turn["writer"] for turn in turns] == ["policy", "environment"] * (len(turns) // 2) + ["policy"]
        assert record["finish_reason"] == ("stop" if record["score"] == 1.0 else "turns")
        assert len(turns) == 5 or record["score"] == 1.0
    assert {record["score"] == 1.0 for record in usual} == {False, True}


GAME = """
import random

async def rollout(policy, prompt, ctx):
    number = random.Random(ctx.seed).randint(1, ctx.options["highest"])
    tokens = list(prompt.tokens)
    while True:
        turn = await policy.sample(tokens)
        guess = turn.text.strip()
        if guess == str(number):
            return 1.0
        answer = "higher" if guess.isdigit() and int(guess) < number else "lower"
        tokens += turn.tokens + ctx.tokenize_messages([{"role": "user", "content": answer}], after=turn)
"""
PLAYED = ["environment.function=null", "environment.options={highest: 7}", "reward.rules=[]"]
FROM_PYTHON = """
import sys
import rlhf_mcore as rm
from game import rollout

rm.train(rm.load_config(sys.argv[1], sys.argv[2:]), rollout=rollout)
"""


@pytest.mark.parametrize("way", ["apart", "from_python"])
def test_a_rollout_function_that_plays_the_game_learns_the_same_bits(guess: Path, whole: Path, way: str) -> None:
    (guess / "game.py").write_text(GAME)
    settings = [*HF, *PLAYED, "trainer.num_steps=3"]
    if way == "from_python":
        config, *small = command("guess", "from_python", *settings)[len(TRAIN) :]
        (guess / "play.py").write_text(FROM_PYTHON)
        done = run_command([sys.executable, "play.py", config, *small], guess)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        run = guess / "outputs" / "quickstart" / "from_python"
    else:
        settings += ["rollout.function=game.py:rollout", "rollout.placement=disaggregated"]
        run = train(guess, "guess", "function_apart", *settings)
    for record, usual in zip(rollouts(run), rollouts(whole), strict=True):
        for key in ("prompt_id", "sample", "response", "score", "finish_reason", "num_tokens", "policy_version"):
            assert record[key] == usual[key]
    assert (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


PLAYERS = """
import asyncio, random

async def rollout(policy, prompt, ctx):
    number = random.Random(ctx.seed).randint(1, 7)
    scores = await asyncio.gather(*(play(policy, prompt, ctx, number) for _ in range(2)))
    return {"reward": sum(scores) / 2, "parts": {"first": scores[0]}}

async def play(policy, prompt, ctx, number):
    tokens = list(prompt.tokens)
    for _ in range(2):
        turn = await policy.sample(tokens, stop=["7"])
        guess = turn.text.strip()
        if guess == str(number):
            return 1.0
        answer = "higher" if guess.isdigit() and int(guess) < number else "lower"
        tokens += turn.tokens + ctx.tokenize_messages([{"role": "user", "content": answer}], after=turn)
    return 0.0
"""


def test_branches_of_a_function_are_equal_at_both_placements_on_engines_of_two_ranks(guess: Path) -> None:
    (guess / "players.py").write_text(PLAYERS)
    settings = ["trainer.world_size=2", "rollout.layout.tp=2", "actor.layout.tp=2", "evaluate.every=0", "data.eval=[]"]
    settings += [*PLAYED, "rollout.function=players.py:rollout", "environment.max_turns=4", "trainer.num_steps=2"]
    here, apart = (
        train(guess, "guess", f"two_{placement}", *settings, f"rollout.placement={placement}")
        for placement in ("colocated", "disaggregated")
    )
    found = rollouts(here)
    assert found == rollouts(apart) and len(found) == 2 * 16
    weights = Path("checkpoint-2") / "actor" / "model.safetensors"
    assert (here / weights).read_bytes() == (apart / weights).read_bytes()
    for record in found:
        policy = [turn["text"] for turn in record["turns"] if turn["writer"] == "policy"]
        assert record["branches"] in (2, 3) and 2 <= len(policy) <= 4  # 3: equal turns of both players
        assert record["score"] in (0.0, 0.5, 1.0) and record["finish_reason"] == "stop"
    assert len({record["score"] for record in found}) > 1
    lines = [json.loads(line) for line in (here / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(line["rollout/logprob_diff_max"] < 1e-3 for line in lines if "rollout/logprob_diff_max" in line)


@pytest.mark.parametrize(
    ("code", "message", "placement"),
    [
        ("def rollout(policy, prompt, ctx): ...", "is not a coroutine function", "colocated"),
        ("async def rollout(policy, prompt, ctx):\n    return await prompt.nothing()\n", "line 2", "disaggregated"),
    ],
)
def test_a_mistake_in_a_rollout_function_ends_the_run_with_one_message(
    guess: Path, code: str, message: str, placement: str
) -> None:
    (guess / "wrong.py").write_text(code)
    name = f"wrong_{placement}"
    settings = ["rollout.function=wrong.py:rollout", f"rollout.placement={placement}", "trainer.num_steps=1"]
    done = run_command(command("guess", name, *HF, *PLAYED, *settings), guess)
    said = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in said, said
    assert said.count("error: ") == 1 and "rollout.function=wrong.py:rollout" in said and message in said, said


SLOW = """
import asyncio, os

class Slow:
    async def reset(self, row, seed):
        self.name, self.turns = row["prompt_id"], 0
        with open("resets", "a") as file:
            file.write(f"{row['prompt_id'].split()[-1]} {seed} {os.getppid()}\\n")

    async def step(self, action):
        await asyncio.sleep(1000 if self.name.endswith("43") else 0.1)
        self.turns += 1
        if self.name.endswith("75"):
            os._exit(1)
        if self.name.endswith("7"):
            raise ValueError("it is broken")
        return "higher", len(action), self.turns == 3
"""
FAILURES = {"train#43": "timeout", "train#475": "error", "train#207": "error", "train#437": "error"}


def test_fault_18_and_24_and_25_engines_are_lost_and_environments_fail_in_the_middle_of_episodes(
    guess: Path,
) -> None:
    (guess / "slow.py").write_text(SLOW)
    settings = ["environment.function=slow.py:Slow", "rollout.engine=hf", "rollout.placement=disaggregated"]
    settings += ["rollout.num_engines=2", "trainer.max_staleness=2", "trainer.num_steps=5", "evaluate.every=0"]
    settings += ["rollout.engine_timeout_s=10", "reward.on_error=zero", "reward.max_error_share=1"]
    settings += ["environment.timeout_s=4", "rollout.sampling.n=2"]
    resets, run = guess / "resets", guess / "outputs" / "quickstart" / "killed"

    def begun() -> list[tuple[str, ...]]:
        """Return prompt, seed and engine of each episode."""
        return [tuple(line.split()) for line in resets.read_text().splitlines()]

    with start_command(command("guess", "killed", *settings), guess, dict(os.environ)) as running:
        running.wait_for(
            lambda: list((run / "rollouts").glob("step-*.jsonl")) and len({engine for _, _, engine in begun()}) == 2
        )
        killed = begun()[-1][2]  # the engine of the newest episode
        [stopped] = {engine for _, _, engine in begun()} - {killed}
        os.kill(int(killed), signal.SIGKILL)
        os.kill(int(stopped), signal.SIGSTOP)
        printed = running.end()
    assert running.process.returncode == 0 and "Traceback" not in printed, printed
    assert printed.count("has failed and is started again") >= 2, printed
    lost = {line[:2] for line in begun() if line[2] == killed}
    assert lost & {line[:2] for line in begun() if line[2] != killed}  # with the same seeds
    found = rollouts(run)
    counts = Counter(record["prompt_id"] for record in found)
    assert len(counts) == 20 and set(counts.values()) == {2}
    assert set(FAILURES) < set(counts)
    for record in found:
        assert record["failure"] == FAILURES.get(record["prompt_id"])
        assert len([turn for turn in record["turns"] if turn["writer"] == "policy"]) == (1 if record["failure"] else 3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert 0 < max(line.get("rollout/staleness_max", 0) for line in lines) <= 2
    assert sum(line.get("reward/timeouts", 0) for line in lines) == 2  # the other failures count as errors
    assert sum(line.get("reward/errors", 0) for line in lines) == 6


def test_an_engine_of_two_ranks_takes_turns_with_a_tool(calculator: Path) -> None:
    ranks = ["trainer.world_size=2", "rollout.layout.tp=2", "actor.layout.tp=2"]
    size = ["trainer.prompts_per_step=16", "trainer.minibatch_size=8", "rollout.sampling.n=8", "trainer.num_steps=4"]
    run = train(calculator, "calculator", "two", *ranks, *size, "bridge.canary=true")
    found, rewards = rollouts(run), mean_rewards(run)
    assert len(found) == 4 * 128 and sum(rewards[-2:]) > sum(rewards[:2]) + 0.2, rewards  # the example learns
    called = [record for record in found if "environment" in [turn["writer"] for turn in record["turns"]]]
    for record in called:
        said, answer = (turn["text"] for turn in record["turns"][:2])
        if record["prompt"][8:].startswith(said.removeprefix("<tool>calculator ").removesuffix("</tool>")):
            assert answer == str(eval(answer)) and record["finish_reason"] in ("stop", "turns", "length")
    assert_registered(run, "timing/prefix_hit")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert called and max(line.get("timing/prefix_hit", 0) for line in lines) > 0  # the share of turns after a call
    assert all(abs(line["rollout/logprob_diff_max"]) < 1e-3 for line in lines if "rollout/logprob_diff_max" in line)


def test_an_agent_uses_a_tool_through_the_client_of_openai(calculator: Path) -> None:
    ranks = ["trainer.world_size=2", "rollout.layout.tp=2", "actor.layout.tp=2"]
    run = train(calculator, "agent", "agent", *ranks, "trainer.num_steps=2", "bridge.canary=true", "evaluate.every=0")
    found = rollouts(run)
    assert len(found) == 2 * 16
    assert all("branches" not in record for record in found)  # it repeats its history unchanged
    called = [record for record in found if record["turns"][0]["text"].startswith("<tool>")]
    assert called and all(turn["writer"] == "environment" for record in called for turn in record["turns"][1::2])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(line["rollout/logprob_diff_max"] < 1e-3 for line in lines if line["step"])


FORKS = """
import asyncio, os
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="none", max_retries=0)

async def play(task, base_url, api_key):
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)

    async def ask(*messages):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message

    with open("players", "a") as file:
        file.write(f"{os.getppid()}\\n")
    first = await ask(*task["messages"])
    begun = [*task["messages"], first, {"role": "tool", "content": "7"}]
    await asyncio.gather(ask(*begun), ask(*begun), ask({"role": "user", "content": "1*1="}))
    if task["prompt_id"].endswith("3"):
        raise ValueError("no idea")
    return len(first.content) / 100
"""


def test_an_agent_that_forks_plays_on_engines_of_their_own_and_its_endpoint_is_killed(calculator: Path) -> None:
    (calculator / "forks.py").write_text(FORKS)
    settings = ["environment.agent.function=forks.py:play", "rollout.engine=hf", "rollout.placement=disaggregated"]
    settings += ["trainer.max_staleness=1", "trainer.num_steps=3", "reward.on_error=zero", "reward.max_error_share=1"]
    players, run = calculator / "players", calculator / "outputs" / "quickstart" / "forks"
    with start_command(command("agent", "forks", *settings), calculator, dict(os.environ)) as running:
        running.wait_for(players.exists)
        os.kill(int(players.read_text().split()[0]), signal.SIGKILL)  # the engine, and with it the endpoint
        printed = running.end()
    assert running.process.returncode == 0 and "Traceback" not in printed, printed
    assert printed.count("has failed and is started again") == 1, printed
    assert len(set(players.read_text().split())) >= 2
    found = rollouts(run)
    assert len(found) == 3 * 16
    for record in found:
        assert record["branches"] == 3 and [turn["writer"] for turn in record["turns"]].count("policy") == 4
        assert (record["failure"] == "error") == record["prompt_id"].endswith("3")
    assert_registered(run, "rollout/branches_mean")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(line.get("rollout/branches_mean", 3) == 3 for line in lines)
    [first] = [line for line in lines if line["step"] == 1]  # the trained policy samples every token
    assert first["rollout/staleness_max"] == 0 and first["rollout/logprob_diff_max"] < 1e-4


LATE = """
import asyncio, os, random
from examples.calculator_agent import play as play_at_once

async def play(task, base_url, api_key):
    with open("engines", "a") as file:
        file.write(f"{os.getppid()}\\n")
    await asyncio.sleep(random.SystemRandom().random() / 5)
    return await play_at_once(task, base_url, api_key)
"""


def test_in_order_an_agent_run_whose_engine_is_killed_is_exact(calculator: Path) -> None:
    (calculator / "late.py").write_text(LATE)
    settings = ["environment.agent.function=late.py:play", "rollout.engine=hf", "rollout.placement=disaggregated"]
    settings += ["trainer.max_staleness=1", "rollout.deterministic_order=true", "trainer.num_steps=3"]
    settings += ["evaluate.every=0"]
    calm = train(calculator, "agent", "calm-agent", *settings)
    engines = calculator / "engines"
    engines.unlink()
    with start_command(command("agent", "engine-killed", *settings), calculator, dict(os.environ)) as running:
        running.wait_for(lambda: engines.exists() and len(engines.read_text().splitlines()) > 20)
        os.kill(int(engines.read_text().split()[0]), signal.SIGKILL)
        printed = running.end()
    assert running.process.returncode == 0 and printed.count("has failed and is started again") == 1, printed
    killed = calm.with_name("engine-killed")
    assert len(rollouts(calm)) == 3 * 16 and rollouts(killed) == rollouts(calm)
    assert (killed / WEIGHTS).read_bytes() == (calm / WEIGHTS).read_bytes()


@pytest.mark.skipif(not machine_level().reaches("namespaces"), reason="this machine gives no namespaces")
def test_a_coding_agent_edits_in_its_sandbox_until_tests_pass(workspace: Path) -> None:
    size = ["trainer.num_steps=2", "trainer.prompts_per_step=4", "trainer.minibatch_size=4", "evaluate.every=0"]
    found = rollouts(train(fit(workspace, "repair", 40), "coding_agent", "coding", *size))
    assert len(found) == 2 * 16
    for record in found:
        policy = [turn["text"] for turn in record["turns"] if turn["writer"] == "policy"]
        told = [turn["text"] for turn in record["turns"] if turn["writer"] == "environment"]
        a, b, result = (int(number) for number in re.findall(r"-?\d+", record["prompt"]))
        [sign] = [sign for sign in "+-*" if eval(f"{a}{sign}{b}") == result]
        assert len(policy) <= 3 and len(told) == len(policy) - 1 and record["failure"] is None
        if record["score"] == 1.0:
            assert f"<edit>a{sign}b</edit>" in policy[-1], record
        for said, answer in zip(policy, told, strict=False):
            if (edit := re.search(r"<edit>a([-+*])b</edit>", said)) is not None:
                got = eval(f"{a}{edit[1]}{b}")
                assert answer == f"<|end|><|tool|>AssertionError: {got}<|end|><|assistant|>"
    assert {record["score"] for record in found} == {0.0, 1.0}
