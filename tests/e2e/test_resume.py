"""Runs that are killed, stopped and moved to another layout, as a user has it: PPO with a critic in a layout of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.checkpoint.manifest import verify
from tests.commands import ROOT, Started, descendants, environment, finished, left_behind, started
from tests.small_disk import small_disk
from tests.tiny_training import make_quickstart

STEPS = 8
REWARD = """
import os
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    if Path("short_of_memory").exists() and list(Path("outputs/quickstart/memory").glob("checkpoint-2")):
        raise MemoryError("cannot allocate")
    if list(Path("outputs/quickstart/exits").glob("checkpoint-2")):
        os._exit(0)
    return (sum(map(ord, solution_str)) % 17) / 16  # differs between responses, so that there is a gradient
"""
SMALL = [
    "rollout.engine=hf",
    "bridge.method=planned",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.sampling.n=2",
    "rollout.sampling.max_new_tokens=12",
    "algorithm.kl.coef=0.01",
    "reward.function=reward.py:score",
    "checkpoint.save_steps=1",
    "checkpoint.save_total_limit=null",
    "logging.console=plain",
    "logging.tensorboard=false",
    "deterministic=true",
    "critic.warmup_steps=1",
    "critic.normalize_returns=true",
]


VLLM = ["rollout.engine=vllm", "rollout.kv_cache_gib=0.02"]


def command(*arguments: str, module: str = "rlhf_mcore.cli.main") -> list[str]:
    config = str(ROOT / "configs" / "quickstart" / "ppo.yaml")
    start = (
        [sys.executable, str(ROOT / "tools" / "chaos.py")]
        if module == "chaos"
        else [sys.executable, "-m", module, "train"]
    )
    return [*start, config, *SMALL, *arguments]


def run(
    directory: Path, *arguments: str, module: str = "rlhf_mcore.cli.main", seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    return finished(command(*arguments, module=module), directory, environment(directory), seconds)


def running(directory: Path, *arguments: str) -> AbstractContextManager[Started]:
    return started(command(*arguments), directory, environment(directory))


def worker_pid(launcher: int, rank: int) -> int:
    """The process of a rank, found by its name, which a process that it is about to start has for a moment too."""
    return next(pid for pid in descendants(launcher) if Path(f"/proc/{pid}/comm").read_text() == f"rank {rank}\n")


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("resume")
    make_quickstart(directory)
    (directory / "reward.py").write_text(REWARD)
    return directory


@pytest.fixture(scope="module")
def tormented(workspace: Path) -> Path:
    """A calm run, and one that was killed three times; with vLLM, saving in the background."""
    arguments = [f"trainer.num_steps={STEPS}", "experiment=x", "checkpoint.async_save=true", "evaluate.every=2", *VLLM]
    done = run(workspace, *arguments, "--kills", "3", "--after-save", "--latest", "0.2", module="chaos", seconds=480)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "3 kills, 0 differences" in done.stdout
    return workspace / "outputs" / "quickstart"


def test_fault_27_a_killed_run_ends_as_one_that_was_left_alone(workspace: Path, tormented: Path) -> None:
    assert_as_left_alone(tormented / "x-calm", tormented / "x-chaos", STEPS)
    assert left_behind(workspace) == []


def test_models_that_leave_the_device_between_their_uses_learn_the_same(workspace: Path, tormented: Path) -> None:
    """Bit by bit, and their checkpoints; on a CPU what leaves is copied from memory to memory, in the same order as on a GPU."""
    arguments = ["trainer.num_steps=2", "experiment=shared", "checkpoint.async_save=true", "evaluate.every=2", *VLLM]
    offload = ["actor.offload=always", "critic.offload=always", "reference.offload=true", "checkpoint.save_steps=2"]
    offload += ["reference.offload_by_layer=true"]
    done = run(workspace, *arguments, *offload)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shared, calm = metrics(tormented / "shared"), metrics(tormented / "x-calm")
    for mine, other in zip(shared, calm, strict=False):
        other.pop("timing/save_s", None)  # they save after other steps
        assert other.keys() == {key for key in mine if not key.startswith("memory/")} - {"timing/save_s"}
        unequal = [key for key in other if mine[key] != other[key]]
        assert all(key.startswith(("timing/", "throughput/")) for key in unequal), unequal
    held = {key.removeprefix("memory/"): value for key, value in shared[1].items() if key.startswith("memory/")}
    # An update needs gradients and the state of an optimizer too; while the engine generates nothing of the models is there.
    assert held["generate_bytes"] == 0 < held["values_bytes"] < held["update_bytes"]
    files = [path.relative_to(tormented / "shared") for path in (tormented / "shared").rglob("*-2/**/*.safetensors")]
    assert len(files) >= 6
    assert all(
        (tormented / "shared" / file).read_bytes() == (tormented / "x-calm" / file).read_bytes() for file in files
    )


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_fault_27_twenty_kills(tmp_path: Path, workspace: Path) -> None:
    """In every phase: start-up, generation, updates, saves, pruning."""
    shutil.copytree(workspace, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("outputs", "tmp"))
    arguments = ["trainer.num_steps=300", "experiment=x", "checkpoint.async_save=true", "checkpoint.save_total_limit=2"]
    arguments += VLLM
    kills = ["--kills", "20", "--latest", "10", "--after-save", "half"]  # later ones find the run at its end
    done = run(tmp_path, *arguments, *kills, module="chaos", seconds=3500)
    assert done.returncode == 0 and "20 kills, 0 differences" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert_as_left_alone(*(tmp_path / "outputs" / "quickstart" / f"x-{kind}" for kind in ("calm", "chaos")), 300)
    assert left_behind(tmp_path) == []


def assert_as_left_alone(calm: Path, chaos: Path, steps: int) -> None:
    assert [record["step"] for record in metrics(chaos)] == list(range(steps + 1))
    assert [c.step for c in scan(chaos)][-1] == steps and verify(chaos / f"checkpoint-{steps}") == []
    for name in ("actor", "critic"):
        folder = Path(f"checkpoint-{steps}") / name
        for path in sorted((calm / folder).rglob("*.safetensors")):
            assert path.read_bytes() == (chaos / path.relative_to(calm)).read_bytes(), path
    first, last = (metrics(calm)[k] for k in (1, -1))
    assert last["actor/grad_norm"] > 0 and first["critic/grad_norm"] > 0
    assert last["progress/samples"] == steps * 8


def test_a_run_ends_with_its_best_model_in_its_processes(workspace: Path, tormented: Path) -> None:
    """The last step is made again, by a run that looks for a metric by which that step is not the best."""
    directory = tormented / "best"
    shutil.copytree(tormented / "x-calm", directory, symlinks=True)
    shutil.rmtree(directory / f"checkpoint-{STEPS}")
    value = {row["step"]: row["evaluate/reward"] for row in metrics(directory) if "evaluate/reward" in row}
    saved = {step: value[step] for step in (2, 4, 6, STEPS)}
    greater = max(saved.values()) > saved[STEPS]
    best = (max if greater else min)(saved, key=lambda step: saved[step])
    assert best != STEPS, saved
    rule = ["checkpoint.metric_for_best_model=evaluate/reward", f"checkpoint.greater_is_better={greater}"]
    arguments = [f"trainer.num_steps={STEPS}", "experiment=best", "evaluate.every=2", *VLLM]
    done = run(workspace, *arguments, *rule, "checkpoint.load_best_model_at_end=true")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *_, last, final = metrics(directory)
    assert last["evaluate/reward"] == saved[STEPS] and verify(directory / f"checkpoint-{STEPS}") == []
    assert final["final/step"] == best and final["final/reward"] == saved[best]
    assert final["final/accuracy"] == next(r["evaluate/accuracy"] for r in metrics(directory) if r["step"] == best)
    assert (directory / "best").readlink() == Path(f"checkpoint-{best}")
    assert f"the run ends with the model of checkpoint-{best}" in done.stdout and "best/actor" in done.stdout
    # As if it had been killed between its last save and that evaluation.
    lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (directory / "metrics.jsonl").write_text("".join(lines[:-1]))
    done = run(workspace, *arguments, *rule, "checkpoint.load_best_model_at_end=true")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("the run continues after its last step") == 1
    assert metrics(directory)[:-1] == [json.loads(line) for line in lines[:-1]] and metrics(directory)[-1] == final


def test_another_layout_goes_on_with_the_same_numbers_and_saves_what_was_asked(
    workspace: Path, tormented: Path
) -> None:
    start = tormented / "x-calm" / "checkpoint-2"
    layout = ["actor.layout.tp=1", "actor.layout.pp=2", "critic.layout.tp=2", "critic.layout.pp=1"]
    prompts = json.loads((start / "dataloader.json").read_text())["state"]["sampler"]["num_prompts"]
    due = [
        "checkpoint.save_steps=0",
        f"checkpoint.save_epochs={16 / prompts}",
        "checkpoint.keep=[3]",
    ]  # 4 prompts a step
    private = ["checkpoint.mode=private"]
    arguments = [f"trainer.num_steps={STEPS}", "experiment=moved", f"checkpoint.resume={start}"]
    arguments += ["rollout.order=longest_first"]
    done = run(workspace, *arguments, *layout, *due, *private, *VLLM)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "changed since: actor.layout.pp was" in done.stdout and "the run continues after step 2 of" in done.stdout
    expected = {record["step"]: record for record in metrics(tormented / "x-calm")}
    found = metrics(tormented / "moved")
    assert [record["step"] for record in found] == list(range(3, STEPS + 1))
    for name in ("loss/total", "loss/value", "actor/grad_norm", "critic/grad_norm", "reward/mean"):
        # The noise of a logprob between layouts (NOISE of tests/distributed/setting.py), which a mean near zero has as well.
        assert found[0][name] == pytest.approx(expected[3][name], rel=2e-4, abs=1e-5), name
    drawn = [json.loads(line) for line in (tormented / "moved/rollouts/step-000003.jsonl").read_text().splitlines()]
    usual = [json.loads(line) for line in (tormented / "x-calm/rollouts/step-000003.jsonl").read_text().splitlines()]
    assert len(drawn) == 8 and [row["response"] for row in drawn] == [row["response"] for row in usual]
    saved = scan(tormented / "moved")
    assert [checkpoint.step for checkpoint in saved] == [3, 4, STEPS]  # named, an epoch (of 16 prompts), the end
    assert_recent(saved[-1].path, found)
    for name, mode in {"actor/training/index.json": 0o600, "config.yaml": 0o600, "manifest.json": 0o644}.items():
        assert (saved[-1].path / name).stat().st_mode & 0o777 & ~0o022 == mode, name
    pinned = subprocess.run(
        [sys.executable, "-m", "rlhf_mcore.cli.main", "pin", str(tormented / "moved"), "4", "good"], check=False
    )
    assert pinned.returncode == 0 and (tormented / "moved/pins/good/actor/config.json").is_file()


def assert_recent(checkpoint: Path, rows: list[dict[str, Any]]) -> None:
    """``trainer_state.json`` tells of the steps what the metrics tell."""
    expected = [
        {"step": r["step"], "time": r["timing/unix_time"], "loss": r.get("loss/total"), "reward": r["reward/mean"]}
        for r in rows
    ]
    assert json.loads((checkpoint / "trainer_state.json").read_text())["recent"] == expected
    assert all(abs(time.time() - row["timing/unix_time"]) < 3600 for row in rows)
    assert all(row["timing/tokens_per_s"] > 0 for row in rows)


def test_fault_28_and_09_a_disk_that_fills_ends_a_run_that_goes_on_after_failed_saves(
    workspace: Path, tormented: Path
) -> None:
    """The second and the last save do not fit: the first is passed over, and the run does not end as if it were done."""
    (disk := workspace / "disk").mkdir()
    with small_disk(disk, size_of(tormented / "x-calm/checkpoint-2") * 3 // 2 // 1024) as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        arguments = ["trainer.num_steps=3", "experiment=full", f"output_dir={disk}", "logging.rollouts_every=0"]
        policy = ["checkpoint.async_save=true", "checkpoint.on_failed_save=continue", "critic.warmup_steps=0"]
        done = run(workspace, *arguments, *policy)
        directory = disk / "quickstart" / "full"
        assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
        assert [c.step for c in scan(directory)] == [1] and verify(directory / "checkpoint-1") == []
        assert (directory / "latest").readlink() == Path("checkpoint-1")
    sentence = re.compile(
        rf"checkpoint-(\d) was not saved: .*{re.escape(str(directory))} needs [\d,]+ bytes for it, [\d,]+ bytes"
    )
    assert sentence.findall(done.stdout) == ["2"]
    assert sentence.findall(done.stderr) == ["3"] and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3, done.stderr


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_what_cannot_be_changed_is_refused_before_anything_is_touched(workspace: Path, tormented: Path) -> None:
    before = (tormented / "x-calm" / "metrics.jsonl").read_bytes()
    done = run(workspace, f"trainer.num_steps={STEPS}", "experiment=x-calm", "seed=5")
    assert done.returncode == 2
    assert "seed was 0 and is 5; restore it, or start a new experiment" in done.stderr
    assert (tormented / "x-calm" / "metrics.jsonl").read_bytes() == before


def test_fault_13_a_dead_rank_ends_the_job_and_is_named(workspace: Path) -> None:
    directory = workspace / "outputs" / "quickstart" / "dead"
    with running(workspace, "trainer.num_steps=1000", "experiment=dead") as job:
        job.wait_for(lambda: scan(directory))
        os.kill(worker_pid(job.process.pid, 1), signal.SIGKILL)
        output = job.end()
    assert job.process.returncode == 128 + signal.SIGKILL
    assert "error: rank 1 was ended by SIGKILL" in output and "Traceback" not in output
    assert verify(scan(directory)[-1].path) == []


def test_fault_26_out_of_memory_leaves_a_valid_state_and_a_port_in_use_is_left_alone(
    workspace: Path, tormented: Path
) -> None:
    directory, flag = workspace / "outputs" / "quickstart" / "memory", workspace / "short_of_memory"
    arguments = [f"trainer.num_steps={STEPS}", "experiment=memory", "evaluate.every=2", *VLLM]
    flag.touch()
    with socket.socket() as taken:
        with suppress(OSError):  # another program holds it: as good
            taken.bind(("127.0.0.1", 29500))  # torch's default
            taken.listen()
        died = run(workspace, *arguments)
        flag.unlink()
        assert died.returncode == 2 and "ran out of memory" in died.stderr
        assert [c.step for c in scan(directory)] == [1, 2] and verify(scan(directory)[-1].path) == []
        done = run(workspace, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    weights = Path(f"checkpoint-{STEPS}") / "actor" / "model.safetensors"
    assert (directory / weights).read_bytes() == (tormented / "x-calm" / weights).read_bytes()


def test_fault_31_a_reward_function_that_exits_with_0_ends_the_run_with_2_and_one_message(workspace: Path) -> None:
    died = run(workspace, f"trainer.num_steps={STEPS}", "experiment=exits")
    directory = workspace / "outputs" / "quickstart" / "exits"
    assert died.returncode == 2, died.stdout[-3000:] + died.stderr[-3000:]
    assert died.stderr.count("ended its process with exit code 0") == 1 and "Traceback" not in died.stderr
    assert [c.step for c in scan(directory)] == [1, 2] and verify(scan(directory)[-1].path) == []
    shutil.rmtree(directory)


def test_fault_14_a_rank_that_stands_still_is_noticed_and_stacks_are_printed(workspace: Path) -> None:
    directory = workspace / "outputs" / "quickstart" / "still"
    with running(workspace, "trainer.num_steps=1000", "experiment=still", "trainer.watchdog_s=20") as job:
        job.wait_for(lambda: scan(directory))
        os.kill(worker_pid(job.process.pid, 1), signal.SIGSTOP)
        output = job.end()
    assert job.process.returncode == 1
    assert "error: rank 1 is stopped, or holds Python's lock in a library: no progress for 20 s" in output
    (log,) = directory.glob("logs/*/*/attempt_0/0/stderr.log")
    assert "most recent call first" in log.read_text()


HELD = """
import ctypes
import os
from pathlib import Path

from rlhf_mcore.algorithms.registry import find_advantage_estimator

def estimate(inputs, cfg):
    if os.environ["RANK"] == "1" and Path("outputs/quickstart/held/checkpoint-1").exists():
        ctypes.PyDLL(None).sleep(600)  # a call into a library that keeps Python's lock
    return find_advantage_estimator("gae")(inputs, cfg)
"""


def test_fault_14_a_rank_whose_users_code_holds_the_interpreter_is_named(workspace: Path) -> None:
    (workspace / "held.py").write_text(HELD)
    own = ["algorithm.advantage=held.py:estimate", "algorithm.use_critic=true"]
    done = run(workspace, "trainer.num_steps=1000", "experiment=held", "trainer.watchdog_s=20", *own)
    assert done.returncode == 1, done.stderr[-3000:]
    assert "error: rank 1 is stopped, or holds Python's lock in a library: no progress for 20 s" in done.stderr
    assert "Traceback" not in done.stderr
    (log,) = (workspace / "outputs" / "quickstart" / "held").glob("logs/*/*/attempt_0/1/stderr.log")
    assert "held.py" in log.read_text(), "the stack is printed without the lock, too"


HUNGRY = """
import os
from pathlib import Path

from rlhf_mcore.algorithms.registry import find_advantage_estimator

def estimate(inputs, cfg):
    if os.environ["RANK"] == "1" and Path("outputs/quickstart/hungry/checkpoint-1").exists():
        bytearray(1 << 50)
    return find_advantage_estimator("gae")(inputs, cfg)
"""


def test_fault_26_a_rank_that_is_out_of_memory_is_named_and_leaves_a_valid_state(workspace: Path) -> None:
    (workspace / "hungry.py").write_text(HUNGRY)
    own = ["algorithm.advantage=hungry.py:estimate", "algorithm.use_critic=true"]
    done = run(workspace, f"trainer.num_steps={STEPS}", "experiment=hungry", *own)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: MemoryError (hungry.py:9, in estimate)\n(rank 1 in phase " in done.stderr, done.stderr[-3000:]
    (saved,) = scan(workspace / "outputs" / "quickstart" / "hungry")
    assert saved.step == 1 and verify(saved.path) == []


def test_fault_30_ctrl_c_saves_says_how_to_continue_and_a_finished_run_says_that_it_is_done(workspace: Path) -> None:
    directory = workspace / "outputs" / "quickstart" / "interrupted"
    arguments = ["experiment=interrupted", "checkpoint.save_steps=0"]
    with running(workspace, "trainer.num_steps=1000", *arguments) as job:
        job.wait_for(lambda: (directory / "metrics.jsonl").exists() and len(metrics(directory)) > 1)
        job.process.send_signal(signal.SIGINT)
        output = job.end()
    assert job.process.returncode == 75 and "Traceback" not in output, output[-3000:]
    (saved,) = scan(directory)
    assert f"saved checkpoint-{saved.step} (asked to stop)" in output and "Ctrl-C: this step is finished" in output
    assert "to continue: " in output.splitlines()[-1] and output.splitlines()[-1].endswith(" ".join(arguments))
    done = run(workspace, f"trainer.num_steps={saved.step}", *arguments)
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith(f"this run is finished: {saved.step} steps were made")
    with running(workspace, "trainer.num_steps=1000", *arguments) as job:
        job.wait_for(lambda: len(metrics(directory)) > saved.step + 2)
        job.process.send_signal(signal.SIGINT)
        job.process.send_signal(signal.SIGINT)
        output = job.end()
    assert (job.process.returncode, "Traceback" in output) in ((130, False), (75, False)), output[-3000:]
    assert f"the run continues after step {saved.step} of 1000" in output


def test_a_killed_agent_takes_its_ranks_along_and_the_restart_finds_the_directory_free(workspace: Path) -> None:
    directory = workspace / "outputs" / "quickstart" / "agentless"
    arguments = ["trainer.num_steps=4", "experiment=agentless", "trainer.max_restarts=1"]
    with running(workspace, *arguments) as job:
        job.wait_for(lambda: scan(directory))
        (agent,) = [
            int(pid)
            for path in Path(f"/proc/{job.process.pid}/task").glob("*/children")
            for pid in path.read_text().split()
        ]
        os.kill(agent, signal.SIGKILL)
        output = job.end()
    assert job.process.returncode == 0, output[-3000:]
    assert "ended with exit code 137; restart 1 of 1" in output and "in use by another run" not in output
    assert [record["step"] for record in metrics(directory)] == list(range(5))


def test_fault_15_a_signal_lets_the_step_end_saves_and_asks_to_be_started_again(workspace: Path) -> None:
    directory = workspace / "outputs" / "quickstart" / "asked"
    arguments = ["experiment=asked", "checkpoint.save_steps=0"]
    with running(workspace, "trainer.num_steps=1000", *arguments) as job:
        job.wait_for(lambda: (directory / "metrics.jsonl").exists() and len(metrics(directory)) > 1)
        os.kill(worker_pid(job.process.pid, 1), signal.SIGUSR1)
        output = job.end()
    assert job.process.returncode == 75, output[-3000:]
    (saved,) = scan(directory)
    assert saved.step == metrics(directory)[-1]["step"] and verify(saved.path) == []
    done = run(workspace, f"trainer.num_steps={saved.step + 1}", *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [record["step"] for record in metrics(directory)] == list(range(saved.step + 2))
