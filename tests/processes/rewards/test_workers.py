"""Run reward functions in worker processes. A failing function ends as its policy says, with one message and no leftovers."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.coroutines import Background, run
from rlhf_mcore.own_processes import MAX_FRAME_BYTES, FrameError, decode, encode
from rlhf_mcore.rewards.function import PooledReward, build_function_reward
from rlhf_mcore.rewards.pool import WorkerLimits, default_workers, local_pool
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.types import Prompt, Score, Trajectory
from tests.commands import wait_for
from tests.episodes import single_turn
from tests.messages import expect_error

HEAD = "import os, signal, sys, time\ndef grade(data_source, solution_str, ground_truth, extra_info):\n    "


def trajectory(text: str, index: int = 0, **extra: Any) -> Trajectory:
    prompt = Prompt(f"train-{index}", index, [1], "What?", data_source="sums", ground_truth="42", extra_info=extra)
    return single_turn(prompt, 3, [5], [-0.1], text, "stop", 0)


@pytest.fixture
def reward(tmp_path: Path):
    """Return a function that builds a reward from a file, or from the body of a function."""
    made: list[PooledReward] = []

    def make(body: str = "", source: str = "", **settings: Any) -> PooledReward:
        path = tmp_path / str(len(made)) / "my_reward.py"
        path.parent.mkdir()
        path.write_text(source or HEAD + body)
        made.append(build_function_reward(RewardConfig(function=f"{path}:grade", **{"workers": 1, **settings})))
        return made[-1]

    yield make
    for each in made:
        each.close()


def processes_with(word: str) -> list[int]:
    """Return the ids of processes whose environment or command line contains ``word``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if word.encode() in text:
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize(("workers", "expected"), [(3, 3), (None, 1)])
def test_so_many_workers_are_started_as_the_configuration_asks_for(
    reward: Any, monkeypatch: pytest.MonkeyPatch, workers: int | None, expected: int
) -> None:
    """Without a number, the default is this rank's share of the cores, and 1 if a machine has more ranks than cores."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    monkeypatch.setenv("WORD", word := f"word-{os.getpid()}-{workers}")
    graded = reward("return 1", workers=workers, env=["WORD"])
    assert [score.value for score in run(graded.score([trajectory("x", number) for number in range(9)]))] == [1.0] * 9

    def count() -> int:
        return len({os.getsid(pid) for pid in processes_with(word)})  # each worker has its own session

    wait_for(lambda: count() >= expected)  # the last worker may still start when the others have graded all responses
    assert count() == expected


def test_more_memory_than_there_can_be_is_no_limit(reward: Any) -> None:
    assert run(reward("return 1", memory_gib=1e300).score([trajectory("x")]))[0].value == 1.0


# Body of the function, and the expected message. The response is "bad", and "good" responses get 1 (see below).
BAD = {
    "raises": ("raise ValueError('no such unit')", r"raised ValueError: no such unit \(my_reward\.py, line 4\)"),
    "none": ("return None", r"returned None \(NoneType\): the score must be a number"),
    "nan": ("return float('nan')", r"returned nan \(float\): the score must be finite"),
    "keyboard interrupt": ("raise KeyboardInterrupt", r"raised KeyboardInterrupt"),
    "sys.exit(0)": ("sys.exit(0)", r"called sys\.exit\(0\)"),
    "os._exit(0)": ("os._exit(0)", r"ended its process with exit code 0"),
    "a crash": ("os.kill(os.getpid(), signal.SIGSEGV)", r"was ended by SIGSEGV"),
    "a kill of its group": ("os.killpg(0, signal.SIGKILL)", r"was ended by SIGKILL"),
    "closed descriptors": ("os.closerange(0, 256)", r"closed the descriptors of its process"),
    "memory": ("hoard = [bytearray(2**24) for _ in range(2**20)]", r"ran out of memory \(reward\.memory_gib=0\.25\)"),
}
NO_ANSWER = {
    "sleep": "time.sleep(10**6)",
    "ignores signals": "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(10**6)",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(10**6)",
    "a child, and signals are ignored": "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; os.fork(); time.sleep(10**6)",
}


def scoring(threads: ThreadPoolExecutor, reward: Any, body: str, timeout_s: float) -> list[Future[list[Score]]]:
    """Score a good, a bad and a good response with the same function under both policies."""
    rows = [trajectory(text, index) for index, text in enumerate(["good", "bad", "good"])]
    guarded = "if solution_str == 'good': return 1\n    " + body
    rewards = [reward(guarded, on_error=policy, timeout_s=timeout_s, memory_gib=0.25) for policy in ("fail", "zero")]
    return [threads.submit(lambda each=each: run(each.score(rows))) for each in rewards]


def check_policies(name: str, scored: list[Future[list[Score]]], cause: str, failure: str) -> None:
    """Check that the bad response ends the run or scores 0."""
    failing, zeroing = scored
    with pytest.raises(ConfigError, match=r"my_reward\.py:grade on prompt 'train-1', sample 3, " + cause) as error:
        failing.result()
    assert "set reward.on_error=zero" in str(error.value), name
    scores = zeroing.result()
    assert scores == [Score(1.0), Score(0.0, failure=failure), Score(1.0)], name
    assert re.search(r"my_reward\.py:grade on prompt 'train-1', sample 3, " + cause, scores[1].cause), name


@pytest.mark.parametrize("name", BAD)
def test_fault_24_and_31_a_bad_function_ends_in_its_policy(
    reward: Callable[..., PooledReward], name: str, capfd: Any
) -> None:
    body, cause = BAD[name]
    with ThreadPoolExecutor() as threads:
        check_policies(name, scoring(threads, reward, body, timeout_s=300.0), cause, "error")
    assert "Traceback" not in capfd.readouterr().err


def test_fault_24_and_31_functions_that_do_not_answer_end_in_their_policy(
    reward: Callable[..., PooledReward], capfd: Any
) -> None:
    with ThreadPoolExecutor(2 * len(NO_ANSWER)) as threads:  # all wait equally long
        scored = {name: scoring(threads, reward, body, timeout_s=1.5) for name, body in NO_ANSWER.items()}
        for name, futures in scored.items():
            check_policies(name, futures, r"gave no result within reward\.timeout_s=1\.5 s", "timeout")
    assert "Traceback" not in capfd.readouterr().err


HARMLESS = {
    "chdir": "os.chdir('/'); return 1",
    "prints": "print('x' * 100_000); os.write(1, b'y' * 100_000); return 1",
    "a child that returns too": "os.fork(); return 1",
    "a thread that stays": "import threading; threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start(); return 1",
    "no standard output": "sys.stdout.close(); sys.stderr = None; return 1",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_fault_31_what_a_function_does_beside_its_score_does_no_harm(
    reward: Callable[..., PooledReward], name: str
) -> None:
    here = os.getcwd()
    scores = run(reward(HARMLESS[name]).score([trajectory("hi", index) for index in range(5)]))
    assert [score.value for score in scores] == [1.0] * 5
    assert os.getcwd() == here


def test_every_call_begins_in_the_directory_of_the_trainer(reward: Callable[..., PooledReward]) -> None:
    body = "here = os.getcwd(); os.chdir('/'); return float(here == ground_truth)"
    rows = [trajectory("hi", index) for index in range(3)]
    for row in rows:
        row.prompt.ground_truth = os.getcwd()
    assert [score.value for score in run(reward(body).score(rows))] == [1.0] * 3


def test_what_a_function_prints_is_seen(reward: Callable[..., PooledReward], capfd: Any) -> None:
    run(reward("print('seen', solution_str); return 1").score([trajectory("here")]))
    assert "seen here" in capfd.readouterr().err


def test_fault_31_a_flood_of_what_a_function_prints_is_cut(reward: Callable[..., PooledReward], capfd: Any) -> None:
    flooding = reward("for _ in range(16 * int(solution_str)): os.write(1, b'x' * 2**16)\n    print('last'); return 1")
    assert [score.value for score in run(flooding.score([trajectory("1"), trajectory("0"), trajectory("1")]))] == [
        1.0
    ] * 3
    shown = capfd.readouterr().err
    assert "is omitted)" in shown and 2**17 <= len(shown) < 2**19 and "last" in shown


def test_workers_see_no_credentials(reward: Callable[..., PooledReward], monkeypatch: Any) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "secret")
    body = "return {'score': 0, **{name: 1 for name, value in os.environ.items() if value == 'secret'}}"
    assert run(reward(body).score([trajectory("hi")]))[0].parts == {}
    assert run(reward(body, env=["JUDGE_KEY"]).score([trajectory("hi")]))[0].parts == {"JUDGE_KEY": 1.0}
    (started_with,) = run(
        reward("return float('secret' in open('/proc/self/environ').read())").score([trajectory("hi")])
    )
    assert started_with.value == 0.0


def test_scores_come_in_order_from_several_workers(reward: Callable[..., PooledReward], tmp_path: Path) -> None:
    """Each worker waits at its first response until all three have one.

    Otherwise two could score all responses on a busy machine.
    """
    begun = tmp_path / "begun"
    begun.mkdir()
    body = f"""open({str(begun)!r} + f'/{{os.getpid()}}', 'w').close()
    while len(os.listdir({str(begun)!r})) < 3: time.sleep(0.005)
    time.sleep(0.002 * (int(solution_str) % 3))
    return {{'score': int(solution_str), 'pid': os.getpid()}}"""
    scores = run(reward(body, workers=3).score([trajectory(str(number), number) for number in range(200)]))
    assert [score.value for score in scores] == list(map(float, range(200)))
    assert len({score.parts["pid"] for score in scores}) == 3


def test_groups_are_scored_while_others_are_waited_for(reward: Callable[..., PooledReward], tmp_path: Path) -> None:
    mark = tmp_path / "go on"
    body = f"while solution_str == 'slow' and not os.path.exists({str(mark)!r}): time.sleep(0.01)\n    return len(solution_str)"
    scored = reward(body, workers=2)
    thread = Background("test")
    slow = thread.start(scored.score([trajectory("slow")]))
    quick = [
        thread.start(scored.score([trajectory("x" * (number + 1), number) for number in range(3)])) for _ in range(4)
    ]
    assert [[score.value for score in future.result()] for future in quick] == [[1.0, 2.0, 3.0]] * 4
    mark.touch()
    assert [score.value for score in slow.result()] == [4.0]
    mark.unlink()
    waits = thread.start(scored.score([trajectory("slow")]))
    wait_for(lambda: not waits.done())
    scored.close()
    with pytest.raises(RuntimeError, match="closed"):  # waiting for ended workers raises
        waits.result()
    thread.close()


def test_a_pool_that_is_closed_while_it_loads_ends_at_once(tmp_path: Path) -> None:
    mark = tmp_path / "loading"
    path = tmp_path / "my_reward.py"
    path.write_text(f"import time\nopen({str(mark)!r}, 'w').close()\ntime.sleep(10**6)")
    options = {"spec": f"{path}:grade", "key": "reward.function"}
    pool = local_pool("a function", "reward", options, WorkerLimits(workers=1))
    with ThreadPoolExecutor(1) as threads:
        checked = threads.submit(pool.check)
        wait_for(mark.exists)
        pool.close()
        with pytest.raises(RuntimeError, match="the workers of a function were closed"):
            checked.result(30)
    with pytest.raises(RuntimeError, match="closed"):
        run(pool.answer_all([b"{}"]))


def test_ctrl_c_frees_the_worker_of_what_was_waited_for(reward: Callable[..., PooledReward], tmp_path: Path) -> None:
    mark = tmp_path / "at it"
    slow = f"open({str(mark)!r}, 'w').close(); time.sleep(10**6)"
    scored = reward(f"if solution_str == 'slow': {slow}\n    return 1")

    def interrupt() -> None:
        wait_for(mark.exists)
        os.kill(os.getpid(), signal.SIGINT)

    Timer(0.2, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(scored.score([trajectory("slow")]))
    assert run(scored.score([trajectory("quick")])) == [Score(1.0)]


def test_a_group_that_fails_takes_no_other_along(reward: Callable[..., PooledReward]) -> None:
    """A worker gets fast items of several groups together. It is killed for the item whose group has failed."""
    scored = reward("return 1 / int(solution_str)", on_error="fail")
    thread = Background("test")
    futures = [
        thread.start(scored.score([trajectory(text, n) for n, text in enumerate(texts)]))
        for texts in ("1111", "2022", "4444")
    ]
    assert [score.value for score in futures[0].result()] == [1.0] * 4
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        futures[1].result()
    assert [score.value for score in futures[2].result()] == [0.25] * 4
    thread.close()


def test_one_worker_keeps_state_between_calls(reward: Callable[..., PooledReward]) -> None:
    source = "seen = 0\ndef grade(*arguments):\n    global seen\n    seen += 1\n    return seen"
    counting = reward(source=source)
    assert [score.value for score in run(counting.score([trajectory("a", i) for i in range(40)]))] == list(range(1, 41))
    assert run(counting.score([trajectory("a")]))[0].value == 41.0


def test_a_random_score_is_that_of_the_response(reward: Callable[..., PooledReward]) -> None:
    source = "import random\nimport numpy\ndef grade(*arguments): return random.random() + numpy.random.rand()"
    rows = [trajectory("a", index) for index in range(9)]
    first = [score.value for score in run(reward(source=source, workers=1).score(rows))]
    second = [score.value for score in run(reward(source=source, workers=2).score(rows[::-1]))][::-1]
    assert first == second and len(set(first)) == 9


def test_arguments_travel_unchanged(reward: Callable[..., PooledReward]) -> None:
    extra = {"list": [1, 2.5, None, True], "deep": {"a": {"b": "é\ud800\x00"}}, "number": 2**80, "long": "x" * 300_000}
    body = f"extra_info['list'].append(1); return float(extra_info == {extra | {'list': [*extra['list'], 1]}!r})"
    row = trajectory("\ud800\n\x00é", **extra)
    assert [score.value for score in run(reward(body).score([row, row]))] == [1.0, 1.0]
    assert row.prompt.extra_info == extra  # the prompt's own dict stays unchanged
    row = trajectory("x", array=np.arange(3), scalar=np.float32(0.5), nested=[np.int64(7)])
    body = "return float(extra_info == {'array': [0, 1, 2], 'scalar': 0.5, 'nested': [7]})"
    assert run(reward(body).score([row]))[0].value == 1.0


def test_what_is_no_json_is_named(reward: Callable[..., PooledReward]) -> None:
    with pytest.raises(ConfigError, match=r"prompt 'train-0', sample 3, cannot be written as JSON: \{1\} is a set"):
        run(reward("return 1").score([trajectory("x", tags={1})]))


def test_a_response_that_fails_once_is_tried_again_on_a_fresh_worker(
    reward: Callable[..., PooledReward], tmp_path: Path
) -> None:
    mark = tmp_path / "been here"
    body = f"if solution_str == '7' and not os.path.exists({str(mark)!r}): open({str(mark)!r}, 'w'); os._exit(1)\n    return 1"
    scores = run(reward(body, workers=2).score([trajectory(str(number), number) for number in range(40)]))
    assert scores == [Score(1.0)] * 40


def test_a_function_that_never_answers_ends_the_run_whatever_the_policy(reward: Callable[..., PooledReward]) -> None:
    rows = [trajectory("a", index) for index in range(1000)]
    with expect_error(ConfigError, value=10):
        run(reward("os._exit(3)", on_error="zero").score(rows))


def test_every_failure_has_its_cause(reward: Callable[..., PooledReward]) -> None:
    scores = run(
        reward("raise ValueError(solution_str)", on_error="zero").score([trajectory(str(n), n) for n in range(50)])
    )
    assert [score.failure for score in scores] == ["error"] * 50
    assert "on prompt 'train-0', sample 3, raised ValueError: 0" in scores[0].cause


def test_fault_24_children_end_with_their_worker(reward: Callable[..., PooledReward]) -> None:
    word = f"sleep-{random.getrandbits(64)}"
    body = f"import subprocess; subprocess.Popen(['sleep', '1000'], env={{'WORD': '{word}'}}); return 1"
    failing = reward(body)
    run(failing.score([trajectory("hi")]))
    wait_for(lambda: len(processes_with(word)) == 1)
    failing.close()
    wait_for(lambda: not processes_with(word))
    assert processes_with(word) == []


def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    word = f"word-{random.getrandbits(64)}"
    path = tmp_path / "my_reward.py"
    body = f"import subprocess; subprocess.Popen(['sleep', '1000'], env={{'WORD': '{word}'}}); print('at it', flush=True)\n"
    path.write_text(HEAD + body + "    while True: pass")
    program = (
        "from rlhf_mcore.config.schema import RewardConfig\n"
        "from rlhf_mcore.coroutines import run\n"
        "from rlhf_mcore.rewards.function import build_function_reward\n"
        "from tests.episodes import single_turn\n"
        "from rlhf_mcore.types import Prompt\n"
        f"reward = build_function_reward(RewardConfig(function={f'{path}:grade'!r}, workers=2, env=['WORD']))\n"
        "rows = [single_turn(Prompt(str(n), n, [1], ''), 0, [1], [0.0], '', 'stop', 0) for n in range(2)]\n"
        "run(reward.score(rows))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, env=os.environ | {"WORD": word}, text=True
    ) as trainer:
        assert trainer.stderr is not None
        assert trainer.stderr.readline() == "at it\n"
        wait_for(lambda: len(processes_with(word)) > 3)  # trainer, two workers, their children
        trainer.kill()
    wait_for(lambda: not processes_with(word))


def test_a_worker_that_ends_between_two_calls_is_replaced(reward: Callable[..., PooledReward]) -> None:
    source = (
        "import os, threading, time\ndef grade(source, text, truth, info):\n"
        "    if text == 'last': threading.Timer(0.05, os._exit, (1,)).start()\n    return os.getpid()"
    )
    scored = reward(source=source)
    first = run(scored.score([trajectory("last")]))[0].value
    status = Path(f"/proc/{int(first)}/status")
    wait_for(lambda: not status.exists() or "zombie" in status.read_text())
    assert run(scored.score([trajectory("next")]))[0] != Score(first)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (
            "def grade(a, b): return 1",
            r"parameters are \(a, b\), line 1 .*let it take \(data_source, solution_str, ground_truth",
        ),
        ("x = 1\n\ndef grade(): return 1", r"parameters are \(\), line 3"),
        ("def grade(a, b, c, d, e): return 1", r"parameters are \(a, b, c, d, e\)"),
        ("def grade(data_source, solution_str, ground_truth, extra_info, more): return 1", r"'?more'?"),
        ("async def grade(a, b, c, d): return 1", r"coroutine function, line 1"),
        ("\nimport no_such_module", r"fails to import \(ModuleNotFoundError.*\(my_reward\.py, line 2\)"),
        ("1 / 0", r"fails to import \(ZeroDivisionError: division by zero\) \(my_reward\.py, line 1\)"),
        ("import sys; sys.exit(0)", r"fails to import \(SystemExit: 0\)"),
        ("import os; os._exit(0)", r"ended its process with exit code 0 while it was loaded"),
        ("raise KeyboardInterrupt", r"raises KeyboardInterrupt"),
        ("grade = 3", r"'grade' is not a function \(int\)"),
    ],
)
def test_a_function_is_checked_in_a_process_of_its_own(tmp_path: Path, source: str, complaint: str) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(source)
    with pytest.raises(ConfigError, match=r"reward\.function.*" + complaint):
        build_reward(RewardConfig(function=f"{path}:grade")).close()


def test_what_takes_the_four_arguments_passes_the_check(tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    for parameters in ("a, b, c, d", "*rest", "a, b, c, d=1, e=2", "ground_truth, solution_str, **rest", "a, b, *rest"):
        path.write_text(f"def grade({parameters}): return 1")
        build_reward(RewardConfig(function=f"{path}:grade")).close()
    path.write_text("class Grader:\n    def __call__(self, a, b, c, d): return 1\ngrade = Grader()")
    build_reward(RewardConfig(function=f"{path}:grade")).close()


def test_a_file_of_the_working_directory_hides_no_module(
    reward: Callable[..., PooledReward], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("json", "socket", "random"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')")
    (tmp_path / "my_helper.py").write_text("VALUE = 5")
    source = "import json\nimport my_helper\ndef grade(a, b, c, d): return json.loads(str(my_helper.VALUE))"
    assert run(reward(source=source).score([trajectory("x")]))[0].value == 5.0


def test_the_cores_of_a_machine_are_shared_by_its_ranks(monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    for ranks, expected in (("1", 8), ("8", 3), ("48", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert default_workers() == expected


def test_frames_come_in_pieces_and_rubbish_is_refused() -> None:
    data, buffer, seen = encode([1, "é\ud800"]) + encode({"a": None}), bytearray(), []
    for byte in data:
        buffer.append(byte)
        seen += decode(buffer)
    assert seen == [[1, "é\ud800"], {"a": None}] and not buffer
    with pytest.raises(FrameError, match="announced"):
        list(decode(bytearray((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))))
    with pytest.raises(FrameError, match="not JSON"):
        list(decode(bytearray(b"\0\0\0\1{")))
