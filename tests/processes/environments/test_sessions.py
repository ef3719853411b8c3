"""Environments in real worker processes: their answers, and sessions whose process is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands import reward_test
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.coroutines import cancel_all, run
from rlhf_mcore.environments import sessions as sessions_module
from rlhf_mcore.environments.sessions import Session, Sessions, StepResult
from rlhf_mcore.rewards.pool import WorkerLimits
from rlhf_mcore.rewards.reward import build_reward
from tests.messages import expect_error

COUNTING = """
import asyncio, os, random, time
from pathlib import Path

class Counting:
    \"\"\"Adds up numbers; what it draws follows from the seed.\"\"\"

    def __init__(self, start=0):
        self.total = start

    def reset(self, row, seed):
        self.random = random.Random(seed)
        return f"{row['prompt']} {self.random.randrange(1000)}"

    def step(self, action):
        if action == "exit" or action == "exit once" and not Path("exited").exists():
            Path("exited").touch()
            os._exit(3)
        if action == "hang":
            time.sleep(600)
        if action == "raise":
            raise KeyError("what")
        if action == "two lines":
            raise ValueError("one\\ntwo")
        if action == "nan":
            return "", float("nan"), False
        if action == "odd":
            return 7, 0, False
        self.total += int(action) if action.isdigit() else 0
        return [{"role": "tool", "content": f"{self.total} {self.random.randrange(1000)}"}], self.total / 10, self.total > 5

class Waiting:
    \"\"\"No step ends before all 256 sessions are in theirs.\"\"\"

    inside, together = 0, asyncio.Event()

    async def reset(self, row, seed):
        return None

    async def step(self, action):
        Waiting.inside += 1
        if Waiting.inside == 256:
            self.together.set()
        await self.together.wait()
        return None, None, True

class Exiting:
    async def reset(self, row, seed):
        self.row = row

    async def step(self, action):
        await asyncio.sleep(60 if self.row["prompt"] == "slow" else 0.01)
        if self.row["prompt"] == "bad":
            os._exit(3)
        return None, 1.0, True

class Lazy:
    def step(self, action): ...
"""
Make = Callable[..., Any]
BASE = Path(__file__).resolve().parents[3] / "configs" / "base.yaml"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Sessions of a class of the file above."""
    monkeypatch.chdir(tmp_path)
    Path("file.py").write_text(COUNTING)
    made: list[Keyed] = []

    def make(
        name: str = "Counting", options: dict[str, Any] | None = None, isolates: bool = True, **limits: Any
    ) -> Keyed:
        bounds = WorkerLimits(**{"workers": 1, **limits})
        made.append(Keyed(Sessions(f"file.py:{name}", options or {}, bounds, isolates=isolates)))
        return made[-1]

    yield make
    for sessions in made:
        sessions.close_all()


class Keyed:
    """Sessions by key. Calls run in ``all_answers`` only."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.loop = sessions, asyncio.new_event_loop()
        self.opened: dict[int, Session] = {}
        self.calls: dict[int, asyncio.Task[StepResult]] = {}

    def open(self, key: int, row: Any, seed: int) -> None:
        self.opened[key] = self.sessions.open(row, seed)
        self.calls[key] = self.loop.create_task(self.opened[key].reset())

    def step(self, key: int, action: str) -> None:
        self.calls[key] = self.loop.create_task(self.opened[key].step(action))

    def close(self, key: int) -> None:
        async def close() -> None:
            await cancel_all([self.calls.pop(key)])
            self.opened.pop(key).close()

        self.loop.run_until_complete(close())

    def close_all(self) -> None:
        for key in list(self.calls):
            self.close(key)
        self.sessions.close_all()
        self.loop.close()


def all_answers(sessions: Keyed) -> dict[int, StepResult]:
    """To everything that was called."""
    calls, sessions.calls = sessions.calls, {}
    answers = sessions.loop.run_until_complete(asyncio.wait_for(asyncio.gather(*calls.values()), 60))
    return dict(zip(calls, answers, strict=True))


def one(sessions: Keyed, key: int, action: str) -> StepResult:
    sessions.step(key, action)
    return all_answers(sessions)[key]


def test_sessions_are_apart_and_a_step_gives_observation_reward_and_end(make: Make) -> None:
    sessions = make(options={"start": 1})
    for key in (1, 2):
        sessions.open(key, {"prompt": "go"}, seed=key)
    first = all_answers(sessions)
    assert first[1].messages[0]["role"] == "user" and first[1].messages[0]["content"].startswith("go ")
    assert first[1].messages != first[2].messages  # the seeds differ
    assert [(a.reward, a.done) for a in (one(sessions, 1, "3"), one(sessions, 1, "4"))] == [(0.4, False), (0.8, True)]
    answer = one(sessions, 2, "2")
    assert answer.messages[0]["role"] == "tool" and answer.messages[0]["content"].startswith("3 ")


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("raise", r"raised KeyError: 'what' (file.py, line 22)"),
        ("two lines", "raised ValueError: one two (file.py, line 24)"),
        ("nan", "the reward must be finite"),
        ("odd", "returned the observation 7 (int) from step: it must be None, a text, a message"),
    ],
)
def test_a_mistake_of_a_class_is_an_answer_with_its_cause(make: Make, action: str, cause: str) -> None:
    sessions = make()
    sessions.open(1, {"prompt": "go"}, seed=1)
    all_answers(sessions)
    answer = one(sessions, 1, action)
    assert cause in answer.error and not answer.timed_out


def test_sessions_of_a_lost_process_are_played_again_and_the_guilty_call_fails_after_a_second_try(make: Make) -> None:
    lost, kept = make(), make()
    for sessions in (lost, kept):
        for key in (1, 2):
            sessions.open(key, {"prompt": "go"}, seed=7 + key)
        all_answers(sessions)
        one(sessions, 1, "1"), one(sessions, 2, "2")
    assert "ended its process with exit code 3" in one(lost, 1, "exit").error
    assert one(lost, 2, "2") == one(kept, 2, "2")  # the replayed session samples the same values
    one(lost, 2, "exit once"), one(kept, 2, "0")
    assert one(lost, 2, "3") == one(kept, 2, "3")


def test_a_call_that_ends_the_process_of_many_takes_no_other_along(make: Make) -> None:
    sessions = make("Exiting")
    for key in range(12):
        sessions.open(key, {"prompt": "bad" if key in (3, 4) else "good"}, seed=key)
    all_answers(sessions)
    for key in range(12):
        sessions.step(key, "go")
    found = all_answers(sessions)
    assert [key for key, answer in found.items() if answer.error] == [3, 4]
    assert "ended its process with exit code 3" in found[3].error
    assert all(answer.reward == 1.0 for key, answer in found.items() if key not in (3, 4))


def test_without_isolation_all_calls_of_a_process_fail_if_it_ends_again(make: Make) -> None:
    sessions = make("Exiting", isolates=False)
    assert sessions.sessions.places == 256
    for key, prompt in enumerate(["slow", "bad"]):
        sessions.open(key, {"prompt": prompt}, seed=key)
    all_answers(sessions)
    for key in (0, 1):
        sessions.step(key, "go")
    assert all("ended its process with exit code 3" in answer.error for answer in all_answers(sessions).values())


def test_a_step_beyond_its_deadline_costs_a_deadline_and_no_other_session(make: Make) -> None:
    sessions = make(timeout_s=0.3, retries=0)
    for key in (1, 2):
        sessions.open(key, {"prompt": "go"}, seed=key)
    all_answers(sessions)
    sessions.step(1, "hang")
    sessions.step(2, "4")
    found = all_answers(sessions)
    assert found[1].timed_out and "within environment.timeout_s=0.3 s" in found[1].error
    assert found[2].reward == 0.4


def test_asynchronous_steps_of_one_process_are_under_way_at_the_same_time(make: Make) -> None:
    sessions = make("Waiting")
    for key in range(256):
        sessions.open(key, {}, seed=0)
    all_answers(sessions)
    for key in range(256):
        sessions.step(key, "")
    found = all_answers(sessions)
    assert len(found) == 256 and all(answer == StepResult(done=True) for answer in found.values())


def test_a_closed_session_is_not_answered(make: Make) -> None:
    sessions = make()
    for key in (1, 2):
        sessions.open(key, {"prompt": "go"}, seed=key)
    sessions.close(1)
    assert list(all_answers(sessions)) == [2]


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Nobody", {}, "defines no 'Nobody'"),
        ("Lazy", {}, "it has no method reset"),
        ("Counting", {"stop": 1, "api_key": "x"}, r"options={'stop': 1, 'api_key': '<redacted>'} raises TypeError"),
    ],
)
def test_what_cannot_be_loaded_is_found_at_the_start(
    make: Make, name: str, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        run(make(name, options).sessions.check())
    assert problem in str(error.value)


KILLED = """
import os, sys
from pathlib import Path

loads = len(list(Path(".").glob("load*")))
Path(f"load{loads}").touch()
if loads < int(Path("kills").read_text()):
    os.kill(os.getpid(), int(Path("signal").read_text()))

class Fine:
    def reset(self, row, seed): return "begun"
    def step(self, action): return None, 1.0, True

def grade(data_source, solution_str, ground_truth, extra_info): return 1.0
"""


@pytest.mark.parametrize("number", [9, 40])  # the second one has no name
def test_a_process_that_is_killed_while_it_loads_is_started_again(make: Make, number: int) -> None:
    make()
    Path("killed.py").write_text(KILLED)
    Path("kills").write_text("2")
    Path("signal").write_text(str(number))
    sessions = Keyed(Sessions("killed.py:Fine", {}, WorkerLimits(workers=1)))
    try:
        sessions.open(0, {"prompt": "go"}, seed=1)
        assert all_answers(sessions)[0].messages == [{"role": "user", "content": "begun"}]
    finally:
        sessions.close_all()
    for load in Path(".").glob("load*"):
        load.unlink()
    build_reward(RewardConfig(function="killed.py:grade")).close()
    Path("kills").write_text("99")
    reward = RewardConfig(function="killed.py:grade")
    fine = Sessions("killed.py:Fine", {}, WorkerLimits(workers=1))
    for load in (lambda: run(fine.check()), lambda: build_reward(reward)):
        with expect_error(ConfigError, field="killed.py", value=("3 times", "SIGKILL" if number == 9 else "signal 40")):
            load()


def test_a_class_that_always_ends_its_process_ends_the_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_LOST_IN_A_ROW", 2)
    sessions = make(retries=0)
    for key in range(3):
        sessions.open(key, {"prompt": "go"}, seed=key)
    all_answers(sessions)
    for key in range(3):
        sessions.step(key, "exit")
    with expect_error(ConfigError, value="2 calls"):
        all_answers(sessions)


def test_reward_test_plays_a_turn_without_a_word(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    Path("run.yaml").write_text(f"base: {BASE}\ndata: {{train: [train.jsonl]}}\n")
    assert reward_test.main(["run.yaml", "environment.function=file.py:Counting"]) == 0
    assert (
        capsys.readouterr().out
        == "environment.function=file.py:Counting: 2 episodes with one empty turn, 0 failed\n\nwarning: environment.max_tokens "
        "is null, so an episode, including the environment's text, has at most 256 tokens, the limit of one turn "
        "(rollout.sampling.max_new_tokens); set it to the tokens of environment.max_turns=8 turns\n"
    )
    assert reward_test.main(["run.yaml", "environment.function=file.py:Counting", "environment.max_tokens=4096"]) == 0
    assert "warning" not in capsys.readouterr().out
    broken = "class Broken:\n    def reset(self, row, seed):\n        pass\n    def step(self, action):\n        return 'higher'\n"
    Path("broken.py").write_text(broken)
    assert reward_test.main(["run.yaml", "environment.function=broken.py:Broken"]) == 2
    told = "2 failed\n2 rows, the first is train.jsonl, line 1: in step: returned 'higher' (str) from step"
    assert told in capsys.readouterr().out  # equal causes are reported once
    Path("slow.py").write_text(broken.replace("pass", "while True: pass").replace("Broken", "Slow"))
    assert reward_test.main(["run.yaml", "environment.function=slow.py:Slow", "environment.timeout_s=0.5"]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err == (
        f"error: environment.function=slow.py:Slow on train.jsonl, line {found.err.partition('line ')[2][0]}, in reset: gave no "
        "answer within environment.timeout_s=0.5 s; the other prompts were not tried. Correct the environment, or raise "
        "environment.timeout_s\n"
    )
