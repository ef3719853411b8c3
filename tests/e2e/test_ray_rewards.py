"""Run reward workers under a real Ray on this machine.

Scores and policies do not depend on the place of the workers. Actors are killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig, RuleConfig
from rlhf_mcore.coroutines import Background, run
from rlhf_mcore.own_processes import children, has_ended
from rlhf_mcore.rewards.function import PooledReward, build_function_reward
from rlhf_mcore.rewards.ray_pool import RayPools
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.rollout.remote.cluster import Cluster
from rlhf_mcore.types import Prompt, Score, Trajectory
from tests.commands import wait_for
from tests.episodes import single_turn
from tests.machine_speed import scale_seconds

ROOT = Path(__file__).resolve().parents[2]
HEAD = "import os, signal, sys, time\ndef grade(data_source, solution_str, ground_truth, extra_info):\n    "


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start Ray once for all tests of this file."""
    cluster = Cluster(None, 1, key="reward.pool")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(cluster.connect).result()
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def pools(cluster: Cluster) -> RayPools:
    return RayPools(cluster.problem)


@pytest.fixture
def reward(tmp_path: Path, pools: RayPools) -> Iterator[Callable[..., PooledReward]]:
    made: list[PooledReward] = []

    def make(body: str, own: RayPools = pools, **settings: Any) -> PooledReward:
        path = tmp_path / "my_reward.py"
        path.write_text(HEAD + body)
        cfg = RewardConfig(function=f"{path}:grade", **{"workers": 1, "on_error": "zero", **settings})
        made.append(build_function_reward(cfg, own))
        return made[-1]

    yield make
    for each in made:
        each.close()


def trajectory(text: str, index: int = 0, truth: Any = "42") -> Trajectory:
    prompt = Prompt(f"train-{index}", index, [1], "What?", data_source="sums", ground_truth=truth)
    return single_turn(prompt, 3, [5], [-0.1], text, "stop", 0)


def rows(count: int) -> list[Trajectory]:
    return [trajectory(str(number), number) for number in range(count)]


def test_scores_are_those_of_local_workers(
    reward: Callable[..., PooledReward], tmp_path: Path, pools: RayPools
) -> None:
    here = f"float(os.getcwd() == {os.getcwd()!r})"
    body = f"import random; return {{'score': int(solution_str) + random.random(), 'here': {here}}}"
    far = run(reward(body, workers=2).score(rows(50)))
    local = build_function_reward(RewardConfig(function=f"{tmp_path}/my_reward.py:grade", workers=1))
    assert far == run(local.score(rows(50))) and far[0].parts == {"here": 1.0}
    local.close()
    pairs = [(r"\boxed{\frac{1}{\sqrt3}}", r"\frac{\sqrt3}{3}"), (r"\boxed{x+1}", "x+2")]
    ruled = build_reward(RewardConfig(rules=[RuleConfig(name="math")], workers=1), pools)
    assert [score.value for score in run(ruled.score([trajectory(*pair[:1], truth=pair[1]) for pair in pairs]))] == [
        1.0,
        0.0,
    ]
    ruled.close()


def test_fault_24_a_bad_function_ends_in_its_policy_there_too(reward: Callable[..., PooledReward]) -> None:
    bad = {
        "1": ("raise ValueError('no such unit')", "error", "raised ValueError: no such unit"),
        "2": ("os._exit(7)", "error", "ended its process with exit code 7"),
        "3": ("os.fork(); time.sleep(10**6)", "timeout", "gave no result within reward.timeout_s=1.5 s"),
        "4": (
            "hoard = [bytearray(2**24) for _ in range(2**20)]",
            "error",
            "ran out of memory (reward.memory_gib=0.25)",
        ),
    }
    body = "\n    ".join(f"if solution_str == '{text}': {what}" for text, (what, *_) in bad.items()) + "\n    return 1"
    scores = run(reward(body, timeout_s=1.5, memory_gib=0.25, workers=2).score(rows(6)))
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    for text, (_, kind, cause) in bad.items():
        found = scores[int(text)]
        assert found.failure == kind and cause in found.cause and f"prompt 'train-{text}', sample 3" in found.cause
    with pytest.raises(ConfigError, match=r"prompt 'train-1', sample 3, raised ValueError: no such unit"):
        run(reward(body, timeout_s=1.5, memory_gib=0.25, on_error="fail").score(rows(3)))


def test_credentials_stay_here(reward: Callable[..., PooledReward], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    body = "return {'score': 0, **{name: 1 for name, value in os.environ.items() if value == 'secret' or 'RAY_AUTH' in name}}"
    assert run(reward(body, env=["JUDGE_KEY"]).score(rows(1)))[0].parts == {"JUDGE_KEY": 1.0}


def test_fault_32_what_an_actor_held_is_tried_on_another_one(
    reward: Callable[..., PooledReward], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The parent of a worker is its actor. It is killed once, in the middle of the fifth response."""
    mark = tmp_path / "been here"
    kill = "os.kill(os.getppid(), 9); time.sleep(99)"
    first = f"solution_str == '5' and not os.path.exists({str(mark)!r})"
    body = f"if {first}: open({str(mark)!r}, 'w'); {kill}\n    return 1"
    assert run(reward(body, workers=2).score(rows(40))) == [Score(1.0)] * 40
    assert "lost its Ray actor" in capfd.readouterr().err
    always = f"if solution_str == '2': {kill}\n    return 1"
    found = run(reward(always).score(rows(4)))
    assert [score.failure for score in found] == [None, None, "error", None]
    assert "lost its Ray actor" in found[2].cause


def test_fault_32_what_a_machine_held_that_is_lost_is_tried_on_another_one(
    reward: Callable[..., PooledReward], tmp_path: Path, cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    """A second node joins. Each node has a slot for one worker.

    All processes of the second node end while both score responses.
    """
    from ray._private.node import Node  # like ray.cluster_utils; `ray start` would not stay on the loopback
    from ray._private.parameter import RayParams

    cores = 65536  # as many as on the first node
    place = RayParams(gcs_address=cluster.joined, node_ip_address="127.0.0.1", num_cpus=cores)
    place.update(object_store_memory=80_000_000, include_log_monitor=False)
    node = Node(place, head=False, shutdown_at_exit=False, spawn_reaper=False)
    try:
        # The parent of a worker is the actor, whose parent is the raylet of its node.
        body = (
            "actor = open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1]\n"
            f"    open({str(tmp_path)!r} + '/on-' + actor, 'w').close()\n"
            f"    while len([name for name in os.listdir({str(tmp_path)!r}) if name.startswith('on-')]) < 2: time.sleep(0.01)\n"
            "    time.sleep(0.02); return int(solution_str)"
        )
        # The first worker waits in its first response until the second has started, which takes minutes on a busy machine.
        graded = reward(body, RayPools(cluster.problem, 40000.0), workers=2, timeout_s=200.0)
        waiting = Background("test").start(graded.score(rows(200)))
        wait_for(lambda: len(list(tmp_path.glob("on-*"))) == 2, 200)
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        assert waiting.result() == [Score(float(number)) for number in range(200)]
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    assert "lost its Ray actor" in capfd.readouterr().err


def test_programs_run_in_the_sandbox_of_an_actor(pools: RayPools) -> None:
    """The programs include a fork bomb, a block of 100 GB and a row with unreadable tests."""
    programs = {
        "print(int(input()) + 1)": ["1\n"],
        "print(1)": ["2\n"],
        "import os\nwhile True: os.fork()": ["1\n"],
        "print(len(bytes(100 * 2**30)))": ["1\n"],
        "print(3)": None,
    }
    rule = RuleConfig(name="code", test_s=1.0, total_s=2.0)
    ruled = build_reward(RewardConfig(rules=[rule], workers=1), pools)
    tests = [expected and {"inputs": ["0\n"], "outputs": expected} for expected in programs.values()]
    scores = run(
        ruled.score(
            [
                trajectory(f"```python\n{code}\n```", truth=truth or "42")
                for code, truth in zip(programs, tests, strict=True)
            ]
        )
    )
    ruled.close()
    assert [(score.value, score.failure) for score in scores] == [(1.0, None), *[(0.0, None)] * 3, (0.0, "error")]


def test_a_function_that_cannot_be_loaded_is_named(reward: Callable[..., PooledReward]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function.*no_such_module"):
        reward("return 1\nimport no_such_module")


def test_groups_are_scored_while_others_are_waited_for(reward: Callable[..., PooledReward], tmp_path: Path) -> None:
    mark = tmp_path / "go on"
    scored = reward(
        f"while solution_str == '0' and not os.path.exists({str(mark)!r}): time.sleep(0.01)\n    return 1", workers=2
    )
    thread = Background("test")
    slow = thread.start(scored.score(rows(1)))
    quick = [thread.start(scored.score(rows(4)[1:])) for _ in range(3)]
    assert [future.result() for future in quick] == [[Score(1.0)] * 3] * 3
    mark.touch()
    assert slow.result() == [Score(1.0)]


def test_the_ranks_of_a_machine_share_one_ray_which_ends_with_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + "return len(solution_str)")
    with socket.create_server(("127.0.0.1", 0)) as free:
        world = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": "2",
            "GROUP_RANK": "0",
        }
    command = [sys.executable, "-m", "tests.e2e.ray_rank", f"{tmp_path}/mine.py:grade"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ranks = [
        subprocess.Popen(
            command,
            env=own | world | {"RANK": rank, "LOCAL_RANK": rank},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    printed = [rank.communicate(timeout=scale_seconds(300)) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed
    (first, address), (second, other) = (json.loads(out) for out, _ in printed)
    assert [line for _, told in printed for line in told.splitlines() if "SIGTERM" in line or "Ray" in line] == []
    assert first == second == [0.0, 1.0, 2.0] and address == other
    host, _, port = address.rpartition(":")
    assert host == "127.0.0.1"
    for _ in range(300):
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            time.sleep(0.1)
            continue
        break
    else:
        pytest.fail("Ray is still there")


def test_there_is_no_ray_at_an_address() -> None:
    with pytest.raises(ConfigError, match=r"reward\.pool=127\.0\.0\.1:1: nobody answers there"):
        os.environ.setdefault("RAY_AUTH_TOKEN", "x" * 32)
        Cluster("127.0.0.1:1", 1, key="reward.pool").connect()


def test_fault_32_a_run_without_ray_ends_with_one_message(reward: Callable[..., PooledReward], pools: RayPools) -> None:
    """This is the last test of the file, because it kills Ray while a response is being scored."""
    waiting = Background("test").start(reward("time.sleep(10**6)", timeout_s=600.0).score(rows(1)))
    time.sleep(1.0)
    (head,) = children()
    os.kill(head, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"reward\.function=.*: Ray on this machine has ended; start the run again"):
        waiting.result()
    assert has_ended(head)
