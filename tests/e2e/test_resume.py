"""Kill, stop, break, move to another layout and resume a PPO run with separate layouts of actor and critic.

Most tests disturb the same run one after another, and each start continues from the last stop. The run must end like
the run ``calm``.
"""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.checkpoint.manifest import verify
from tests.commands import ROOT, Started, descendants, environment, left_behind, run_command, start_command
from tests.small_disk import small_disk
from tests.tiny_training import make_quickstart
from tools.chaos import checkpoint_differences, children, metric_differences, read_metrics

STEPS = 8
# The file `fault` names the fault of a rank of the run `disturbed`.
FAULTS = """\
import ctypes
import os
import time
from pathlib import Path

from rlhf_mcore.algorithms.registry import find_advantage_estimator

def is_wanted(fault):
    return Path("fault").exists() and Path("fault").read_text() == fault and Path("outputs/quickstart/disturbed/checkpoint-1").exists()

def score(data_source, solution_str, ground_truth, extra_info):
    if open(f"/proc/{os.getppid()}/comm").read().startswith("rank "):  # before ranks start, the command tries the reward
        while is_wanted("hold"):
            Path("held").write_text(str(os.getppid()))
            time.sleep(0.05)
        if is_wanted("memory of the reward"):
            raise MemoryError("cannot allocate")
        if is_wanted("exit of the reward"):
            os._exit(0)
    return (sum(map(ord, solution_str)) % 17) / 16  # differs between responses, so that there is a gradient

def estimate(inputs, cfg):
    if os.environ["RANK"] == "1" and is_wanted("interpreter"):
        ctypes.PyDLL(None).sleep(600)  # a call into a library that keeps Python's lock
    if os.environ["RANK"] == "1" and is_wanted("memory of a rank"):
        bytearray(1 << 50)
    return find_advantage_estimator("gae")(inputs, cfg)
"""
SMALL = [
    "rollout.engine=hf",
    "bridge.method=planned",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.sampling.n=2",
    "rollout.sampling.max_new_tokens=12",
    "algorithm.kl.coef=0.01",
    "algorithm.advantage=faults.py:estimate",
    "algorithm.use_critic=true",
    "reward.function=faults.py:score",
    "evaluate.every=2",
    "checkpoint.save_steps=1",
    "checkpoint.save_total_limit=null",
    "checkpoint.async_save=true",
    "logging.console=plain",
    "logging.rollouts_every=1",
    "logging.trackers=[]",
    "deterministic=true",
    "critic.warmup_steps=1",
    "critic.normalize_returns=true",
]


def command(experiment: str, *arguments: str) -> list[str]:
    config = str(ROOT / "configs" / "quickstart" / "ppo.yaml")
    whole = [config, *SMALL, f"trainer.num_steps={STEPS}", f"experiment={experiment}", *arguments]
    return [sys.executable, "-m", "rlhf_mcore.cli.main", "train", *whole]


def run(directory: Path, experiment: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(command(experiment, *arguments), directory, environment(directory))


def run_to_its_end(directory: Path, experiment: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = run(directory, experiment, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def rank_process(launcher: int, rank: int) -> int:
    """Return the process of a rank. A new child process briefly has the same name."""
    return next(pid for pid in descendants(launcher) if Path(f"/proc/{pid}/comm").read_text() == f"rank {rank}\n")


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("resume")
    make_quickstart(directory)
    (directory / "faults.py").write_text(FAULTS)
    return directory


@pytest.fixture(scope="module")
def calm(workspace: Path) -> Path:
    """Return the directory of an undisturbed run."""
    run_to_its_end(workspace, "calm")
    return workspace / "outputs" / "quickstart" / "calm"


@pytest.mark.ci
def test_ppo_trains_an_actor_and_a_critic_in_layouts_of_their_own(calm: Path) -> None:
    assert [record["step"] for record in metrics(calm)] == list(range(STEPS + 1))
    assert verify(calm / f"checkpoint-{STEPS}") == [] and (calm / "latest").readlink() == Path(f"checkpoint-{STEPS}")
    first, last = metrics(calm)[1], metrics(calm)[-1]
    assert "actor/grad_norm" not in first and first["critic/grad_norm"] > 0  # the critic learns alone at the start
    assert last["actor/grad_norm"] > 0 and last["critic/grad_norm"] > 0 and last["progress/samples"] == STEPS * 8
    for step in metrics(calm)[1:]:
        assert step["rollout/logprob_diff_max"] < 1e-4
    for role in ("actor", "critic"):
        files = [calm / f"checkpoint-{step}" / role / "model.safetensors" for step in (1, 2)]
        assert files[0].read_bytes() != files[1].read_bytes()


@dataclass(frozen=True)
class Disturbed:
    """A run that tests disturb."""

    workspace: Path
    directory: Path

    @property
    def step(self) -> int:
        """Return the step of the newest checkpoint, which must be valid."""
        newest = scan(self.directory)[-1]
        assert verify(newest.path) == []
        return newest.step

    def break_by(self, fault: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Start the run with a fault, and wait for its end."""
        (self.workspace / "fault").write_text(fault)
        return run(self.workspace, "disturbed", *arguments)

    @contextmanager
    def hold(self, *arguments: str) -> Iterator[Held]:
        """Start the run, and yield while it waits in the middle of its next step."""
        (self.workspace / "fault").write_text("hold")
        with start_command(command("disturbed", *arguments), self.workspace, environment(self.workspace)) as job:
            held = Held(self.workspace, job)
            held.wait()
            yield held


@dataclass(frozen=True)
class Held:
    """A running command whose run waits in the middle of a step."""

    workspace: Path
    job: Started

    def wait(self) -> None:
        """Wait until a rank that is alive waits."""
        self.job.wait_for(self._is_waiting)

    def _is_waiting(self) -> bool:
        file = self.workspace / "held"
        return file.exists() and (pid := file.read_text()).isdecimal() and int(pid) in descendants(self.job.process.pid)

    def signal_rank(self, number: int) -> None:
        """Send a signal to the second rank."""
        os.kill(rank_process(self.job.process.pid, 1), number)

    def end(self) -> str:
        """Let the run continue, and wait for its end. Returns its output."""
        (self.workspace / "fault").unlink()
        return self.job.end()


@pytest.fixture
def disturbed_run(workspace: Path) -> Iterator[Disturbed]:
    directory = workspace / "outputs" / "quickstart" / "disturbed"
    if directory.exists() and scan(directory)[-1].step >= STEPS:
        pytest.skip("an earlier test let the run come to its end")
    yield Disturbed(workspace, directory)
    (workspace / "fault").unlink(missing_ok=True)


def test_fault_13_a_dead_rank_ends_the_job_and_is_named(disturbed_run: Disturbed) -> None:
    with disturbed_run.hold() as held:
        held.signal_rank(signal.SIGKILL)
        output = held.job.end()
    assert held.job.process.returncode == 128 + signal.SIGKILL
    assert "error: rank 1 was ended by SIGKILL" in output and "Traceback" not in output
    assert 1 <= disturbed_run.step <= 2


def test_fault_15_after_a_restart_a_signal_lets_the_step_end_and_saves(disturbed_run: Disturbed) -> None:
    """The agent is killed first. Its ranks end with it, and the restart finds the directory unlocked."""
    before = disturbed_run.step
    with disturbed_run.hold("checkpoint.save_steps=0", "trainer.max_restarts=1") as held:
        launcher = held.job.process.pid
        [agent] = children(launcher)
        os.kill(agent, signal.SIGKILL)
        held.job.wait_for(lambda: "restart 1 of 1" in held.job.output())
        held.wait()
        held.signal_rank(signal.SIGUSR1)
        output = held.end()
    assert "ended with exit code 137; restart 1 of 1" in output and "in use by another run" not in output
    assert held.job.process.returncode == 75, output[-3000:]
    assert disturbed_run.step == metrics(disturbed_run.directory)[-1]["step"] > before


def test_fault_30_ctrl_c_saves_and_prints_the_command_that_continues(disturbed_run: Disturbed) -> None:
    before = disturbed_run.step
    with disturbed_run.hold("checkpoint.save_steps=0") as held:
        held.job.process.send_signal(signal.SIGINT)
        output = held.end()
    assert held.job.process.returncode == 75 and "Traceback" not in output, output[-3000:]
    assert f"the run continues after step {before} of {STEPS}" in output and disturbed_run.step > before
    assert (
        f"saved checkpoint-{disturbed_run.step} (stop requested)" in output
        and "Ctrl-C: the run finishes and saves this step" in output
    )
    assert output.splitlines()[-1].startswith("to continue: ")
    assert output.splitlines()[-1].endswith("experiment=disturbed checkpoint.save_steps=0")


def test_a_finished_run_says_so(disturbed_run: Disturbed) -> None:
    done = run(disturbed_run.workspace, "disturbed", f"trainer.num_steps={disturbed_run.step}")
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.startswith(f"this run is finished: {disturbed_run.step} steps were made")


def test_fault_14_a_rank_that_stands_still_is_noticed_and_stacks_are_printed(disturbed_run: Disturbed) -> None:
    with disturbed_run.hold("trainer.watchdog_s=20") as held:
        held.signal_rank(signal.SIGSTOP)
        output = held.end()
    assert held.job.process.returncode == 1
    assert "error: rank 1 is stopped, or holds Python's lock in a library: no progress for 20 s" in output
    assert "most recent call first" in last_log(disturbed_run.directory, 0)


def test_fault_14_a_rank_whose_users_code_holds_the_interpreter_is_named(disturbed_run: Disturbed) -> None:
    done = disturbed_run.break_by("interpreter", "trainer.watchdog_s=20")
    assert done.returncode == 1, done.stderr[-3000:]
    assert "error: rank 1 is stopped, or holds Python's lock in a library: no progress for 20 s" in done.stderr
    assert "Traceback" not in done.stderr
    assert "faults.py" in last_log(disturbed_run.directory, 1), "the stack is printed without the lock, too"


def last_log(directory: Path, rank: int) -> str:
    """Return the standard error of a rank at the last start."""
    return max(
        directory.glob(f"logs/*/*/attempt_0/{rank}/stderr.log"), key=lambda file: file.stat().st_mtime
    ).read_text()


def test_fault_26_a_rank_that_is_out_of_memory_is_named_and_leaves_a_valid_state(disturbed_run: Disturbed) -> None:
    before = disturbed_run.step
    done = disturbed_run.break_by("memory of a rank")
    line = 1 + FAULTS.splitlines().index("        bytearray(1 << 50)")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"error: MemoryError (faults.py:{line}, in estimate)\n(rank 1 in phase " in done.stderr, done.stderr[-3000:]
    assert disturbed_run.step == before


def test_fault_26_a_reward_that_is_out_of_memory_leaves_a_valid_state_and_a_port_in_use_is_left_alone(
    disturbed_run: Disturbed,
) -> None:
    before = disturbed_run.step
    with socket.socket() as taken:
        with suppress(OSError):  # another program occupies it, which is equivalent
            taken.bind(("127.0.0.1", 29500))  # torch's default
            taken.listen()
        died = disturbed_run.break_by("memory of the reward")
    assert died.returncode == 2 and "ran out of memory" in died.stderr
    assert disturbed_run.step == before


def test_fault_31_a_reward_function_that_exits_with_0_ends_the_run_with_2_and_one_message(
    disturbed_run: Disturbed,
) -> None:
    before = disturbed_run.step
    died = disturbed_run.break_by("exit of the reward")
    assert died.returncode == 2, died.stdout[-3000:] + died.stderr[-3000:]
    assert died.stderr.count("ended its process with exit code 0") == 1 and "Traceback" not in died.stderr
    assert disturbed_run.step == before


@pytest.fixture(scope="module")
def finished_run(workspace: Path) -> Path:
    """Run the disturbed run to its end. At its last start, models leave the device between their uses."""
    offload = [
        "actor.offload=always",
        "critic.offload=always",
        "reference.offload=by_layer",
    ]
    run_to_its_end(workspace, "disturbed", *offload)
    return workspace / "outputs" / "quickstart" / "disturbed"


def test_fault_27_a_disturbed_run_ends_as_one_that_was_left_alone(
    workspace: Path, calm: Path, finished_run: Path
) -> None:
    """Metrics of all steps, weights, optimizers and everything else in the last checkpoint are equal bit for bit."""
    found = [
        {name: value for name, value in row.items() if not name.startswith("memory/")}
        for row in read_metrics(finished_run)
    ]
    assert metric_differences(read_metrics(calm), found) == []
    assert checkpoint_differences(calm, finished_run) == []
    assert left_behind(workspace) == []


def test_models_leave_the_device_between_their_uses(finished_run: Path) -> None:
    held = {name.removeprefix("memory/"): value for name, value in metrics(finished_run)[-1].items()}
    # An update also needs gradients and optimizer state. While the engine generates, no model is on the device.
    assert held["generate_bytes"] == 0 < held["values_bytes"] < held["update_bytes"]


def test_a_run_ends_with_its_best_model_in_its_processes(workspace: Path, calm: Path) -> None:
    """A copy of a finished run has a metric by which its last step is not the best. Only the final evaluation remains."""
    directory = calm.with_name("best")
    shutil.copytree(calm, directory, symlinks=True)
    *_, last = before = metrics(directory)
    value = {row["step"]: row["evaluate/reward"] for row in before if row["step"] and "evaluate/reward" in row}
    greater = max(value.values()) > value[STEPS]
    best = (max if greater else min)(value, key=lambda step: value[step])
    assert best != STEPS, value
    rule = [f"checkpoint.metric_for_best_model={'' if greater else '-'}evaluate/reward"]
    done = run_to_its_end(workspace, "best", *rule, "checkpoint.load_best_model_at_end=true")
    assert done.stdout.count("the run continues after its last step") == 1
    assert f"the run ends with the model of checkpoint-{best}" in done.stdout and "best/actor" in done.stdout
    *same, final = metrics(directory)
    assert same == before and last["evaluate/reward"] == value[STEPS]
    assert final["final/step"] == best and final["final/reward"] == value[best]
    assert final["final/accuracy"] == next(row["evaluate/accuracy"] for row in before if row["step"] == best)
    assert (directory / "best").readlink() == Path(f"checkpoint-{best}")


def test_another_layout_continues_with_the_same_numbers_and_saves_when_asked(workspace: Path, calm: Path) -> None:
    start, directory = calm / "checkpoint-2", calm.with_name("moved")
    layout = ["actor.layout.tp=1", "actor.layout.pp=2", "critic.layout.tp=2", "critic.layout.pp=1"]
    prompts = json.loads((start / "dataloader.json").read_text())["state"]["sampler"]["num_prompts"]
    due = [
        "checkpoint.save_steps=0",
        f"checkpoint.save_epochs={16 / prompts}",
        "checkpoint.keep=[3]",
    ]  # 4 prompts per step
    more = [f"checkpoint.resume={start}", "checkpoint.mode=private", "rollout.order=longest_first"]
    done = run_to_its_end(workspace, "moved", *layout, *due, *more)
    assert "changed since: actor.layout.pp was" in done.stdout and "the run continues after step 2 of" in done.stdout
    expected = {record["step"]: record for record in metrics(calm)}
    found = metrics(directory)
    assert [record["step"] for record in found] == list(range(3, STEPS + 1))
    for name in ("loss/total", "loss/value", "actor/grad_norm", "critic/grad_norm", "reward/mean"):
        # The noise of a logprob between layouts (NOISE of tests/distributed/setting.py). A mean near zero has the same noise.
        assert found[0][name] == pytest.approx(expected[3][name], rel=2e-4, abs=1e-5), name
    sampled, usual = ((each / "rollouts" / "step-000003.jsonl").read_text().splitlines() for each in (directory, calm))
    assert len(sampled) == 8
    assert [json.loads(row)["response"] for row in sampled] == [json.loads(row)["response"] for row in usual]
    saved = scan(directory)
    assert [checkpoint.step for checkpoint in saved] == [3, 4, STEPS]  # named, an epoch (16 prompts), the end
    assert_recent(saved[-1].path, found)
    for name, mode in {"actor/training/index.json": 0o600, "config.yaml": 0o600, "manifest.json": 0o644}.items():
        assert (saved[-1].path / name).stat().st_mode & 0o777 & ~0o022 == mode, name


def assert_recent(checkpoint: Path, rows: list[dict[str, Any]]) -> None:
    """Check that ``trainer_state.json`` lists the last steps with values from the metrics."""
    expected = [
        {"step": r["step"], "time": r["timing/unix_time"], "loss": r.get("loss/total"), "reward": r["reward/mean"]}
        for r in rows
    ]
    assert json.loads((checkpoint / "trainer_state.json").read_text())["recent"] == expected
    assert all(abs(time.time() - row["timing/unix_time"]) < 3600 for row in rows)
    assert all(row["timing/tokens_per_s"] > 0 for row in rows)


def test_fault_28_and_09_a_disk_that_fills_ends_a_run_that_goes_on_after_failed_saves(
    workspace: Path, calm: Path
) -> None:
    """The second and the last save do not fit.

    Training continues after the first failure, and the run does not end as finished.
    """
    (disk := workspace / "disk").mkdir()
    with small_disk(disk, size_of(calm / "checkpoint-2") * 3 // 2 // 1024) as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        arguments = ["trainer.num_steps=3", f"output_dir={disk}", "logging.rollouts_every=0", "evaluate.every=0"]
        done = run(workspace, "full", *arguments, "checkpoint.on_failed_save=continue", "critic.warmup_steps=0")
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


def test_a_dry_run_checks_a_resume_and_all_data_and_changes_nothing(workspace: Path, calm: Path) -> None:
    copy = calm.with_name("dry")
    shutil.copytree(calm, copy, symlinks=True)
    dry = [f"trainer.num_steps={STEPS + 1}", "--dry-run"]

    def content() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.suffix != ".lock"}

    done = run(workspace, "dry", *dry)
    assert done.returncode == 0 and "starting" not in done.stdout, done.stdout + done.stderr
    assert f"the run continues after step {STEPS} of {STEPS + 1}" in done.stdout and "first prompt" in done.stdout
    assert [line.strip() for line in done.stdout.splitlines() if "changed since" in line] == [
        f"changed since: trainer.num_steps was {STEPS} and is {STEPS + 1}"
    ]
    weights = next((copy / f"checkpoint-{STEPS}" / "critic").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    before = content()
    done = run(workspace, "dry", "checkpoint.on_damaged=error", *dry)
    assert done.returncode == 2 and f"checkpoint-{STEPS} is damaged: critic/{weights.name}" in done.stderr
    done = run(workspace, "dry", *dry)
    assert done.returncode == 0 and f"the run continues after step {STEPS - 1} of {STEPS + 1}" in done.stdout
    assert content() == before
    rows = [{"prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}} for n in range(100)]
    rows.append({**rows[0], "prompt": "1+" * 5000})
    (workspace / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(workspace, "none", "data.train=rows.jsonl", *dry)
    assert done.returncode == 2 and "line 101" in done.stderr and "data.max_prompt_tokens" in done.stderr
    assert not calm.with_name("none").exists()


def test_a_changed_seed_is_rejected_before_anything_is_touched(workspace: Path, calm: Path) -> None:
    before = (calm / "metrics.jsonl").read_bytes()
    done = run(workspace, "calm", "seed=5")
    assert done.returncode == 2
    assert "seed was 0 and is 5; restore it, or start a new experiment" in done.stderr
    assert (calm / "metrics.jsonl").read_bytes() == before
