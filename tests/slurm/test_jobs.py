"""Check the outcomes of jobs on a real SLURM. The ranks are stand-ins that count (tests/stand_in.py). test_training.py
uses real ranks.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.commands import processes_with, wait_for
from tests.machine_speed import scale_seconds
from tests.slurm.cluster import MINUTES, Cluster

ROOT = Path(__file__).resolve().parents[2]
MANY = "trainer.num_steps=100000"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Return a working directory with a configuration that `plan` accepts, and a model that consists of its config.json."""
    model = json.loads((ROOT / "configs" / "models" / "Qwen2.5-0.5B-Instruct" / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    (tmp_path / "run.yaml").write_text(
        "model: {path: model}\nproject: jobs\nexperiment: run\ndata: {train: [train.jsonl]}\n"
        "trainer: {prompts_per_step: 32}\n"
    )
    return tmp_path


def submit(
    cluster: Cluster, workspace: Path, *arguments: str, script: str = "submit.sh", **variables: str
) -> list[str]:
    """Submit a job with stand-ins as ranks. Returns the job ids."""
    stand_in = {"RLHF_MCORE_MODULE": "tests.stand_in", "JOB_OF_TEST": workspace.name, "RLHF_MCORE_PLAN": "0"}
    environment = cluster.environment | stand_in | variables
    done = subprocess.run(
        [script, *arguments],
        cwd=workspace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=scale_seconds(240),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def with_gpus() -> list[str]:
    """Return the arguments for both GPUs of a node of the test cluster."""
    return ["run.yaml", "--gpus-per-node", "2", "--time", MINUTES, "--signal-before", "30"]


def small(nodes: int = 2) -> list[str]:
    return ["run.yaml", "--nodes", str(nodes), "--ranks-per-node", "2", "--time", MINUTES, "--signal-before", "30"]


def log(workspace: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((workspace / "outputs" / "slurm").glob("*.out")))


def rank_logs(workspace: Path) -> str:
    folder = workspace / "outputs" / "jobs" / "run" / "logs"
    return "".join(path.read_text() for path in sorted(folder.glob("*/node-*/*/attempt_0/*/stderr.log")))


def counts(workspace: Path, experiment: str = "run") -> list[int]:
    folder = workspace / "outputs" / "jobs" / experiment
    return [int(path.read_text()) for path in sorted(folder.glob("count-*"))]


def wait_for_counting(cluster: Cluster, job_id: str, workspace: Path, ranks: int, least: int = 1) -> None:
    cluster.wait_for(
        lambda: len(counts(workspace)) == ranks and min(counts(workspace)) >= least, job_id, lambda: log(workspace)
    )


def exit_code(job: dict[str, str]) -> int:
    return int(job["ExitCode"].partition(":")[0])


def test_the_signal_before_the_limit_puts_the_job_back_and_it_goes_on(cluster: Cluster, workspace: Path) -> None:
    (job_id,) = submit(cluster, workspace, *small(), "trainer.num_steps=60", RLHF_MCORE_PLAN="1")
    wait_for_counting(cluster, job_id, workspace, 4, 2)
    cluster.run("scancel", "--batch", "--signal=USR1", job_id)  # as --signal=B:USR1@30 does before the limit
    job = cluster.wait(job_id)
    assert (job["JobState"], job["Restarts"], exit_code(job)) == ("COMPLETED", "1", 0), log(workspace)
    assert "4 x H100" in log(workspace) and "SIGUSR1" in log(workspace)  # the plan was printed, and the signal arrived
    assert counts(workspace) == [60] * 4
    begun = [int(count) for count in re.findall(r"begins at (\d+)", rank_logs(workspace))]
    assert len(begun) == 8 and sum(count == 0 for count in begun) == 4 and all(count < 60 for count in begun)


@pytest.mark.parametrize("options", [small(1), with_gpus()], ids=["ranks", "gpus"])
def test_ranks_share_all_cores_of_their_part_of_the_node(cluster: Cluster, workspace: Path, options: list[str]) -> None:
    """By default, SLURM binds all ranks of a node to one core."""
    for more in ((), ("--exclusive",)):
        (job_id,) = submit(cluster, workspace, *options, "trainer.num_steps=1", *more)
        assert cluster.wait(job_id)["JobState"] == "COMPLETED", log(workspace)
    assert re.findall(r"begins at \d+ on (\d+) cores", rank_logs(workspace)) == ["2"] * 4


def test_a_job_that_is_always_told_to_stop_is_not_requeued_for_ever(cluster: Cluster, workspace: Path) -> None:
    (job_id,) = submit(cluster, workspace, *small(1), "--max-requeues", "0", MANY)
    wait_for_counting(cluster, job_id, workspace, 2)
    cluster.run("scancel", "--batch", "--signal=USR1", job_id)
    job = cluster.wait(job_id)
    assert (job["JobState"], job.get("Restarts"), exit_code(job)) == ("FAILED", "0", 75), log(workspace)
    assert "which is the limit" in log(workspace)


def test_a_failing_rank_ends_the_job_with_its_code_after_the_restarts_it_is_allowed(
    cluster: Cluster, workspace: Path
) -> None:
    (job_id,) = submit(
        cluster, workspace, *small(), MANY, "trainer.max_restarts=1", STAND_IN_FAILS="3:2:7", STAND_IN_ALWAYS="1"
    )
    job = cluster.wait(job_id)
    assert (job["JobState"], job["Restarts"], exit_code(job)) == ("FAILED", "0", 7), log(workspace)
    assert log(workspace).count("the stand-in fails as it was told") == 2
    assert "restart 1 of 1" in log(workspace)


def test_scancel_is_final_and_leaves_no_process(cluster: Cluster, workspace: Path) -> None:
    (job_id,) = submit(cluster, workspace, *small(), MANY)
    wait_for_counting(cluster, job_id, workspace, 4)
    assert processes_with("JOB_OF_TEST", workspace.name)
    cluster.run("scancel", job_id)
    job = cluster.wait(job_id)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), log(workspace)
    wait_for(lambda: not processes_with("JOB_OF_TEST", workspace.name))


def test_a_bad_node_is_named_and_left_out_next_time(cluster: Cluster, workspace: Path) -> None:
    check = workspace / "check"
    check.write_text('#!/bin/bash\nif [[ "$SLURMD_NODENAME" == n1 ]]; then echo "a fan of n1 is loose"; exit 1; fi\n')
    check.chmod(0o755)
    (job_id,) = submit(cluster, workspace, *small(2), "trainer.num_steps=2", RLHF_MCORE_NODE_CHECK=str(check))
    job = cluster.wait(job_id)
    assert (job["JobState"], job["ExcNodeList"], job["NodeList"]) == ("COMPLETED", "n1", "n[2-3]"), log(workspace)
    assert "nodes with errors: n1" in log(workspace) and "a fan of n1 is loose" in log(workspace)


def test_an_array_has_a_run_for_every_number(cluster: Cluster, workspace: Path) -> None:
    (job_id,) = submit(
        cluster, workspace, *small(1), "--array", "3-4", "trainer.num_steps=2", "experiment=s-%a", "seed=%a"
    )
    for number in (3, 4):
        assert cluster.wait(f"{job_id}_{number}")["JobState"] == "COMPLETED", log(workspace)
        assert counts(workspace, f"s-{number}") == [2, 2]


def test_a_chain_starts_a_stage_when_the_one_before_has_ended_well(cluster: Cluster, workspace: Path) -> None:
    stages = [["--", "run.yaml", f"experiment={name}", "trainer.num_steps=2"] for name in ("sft", "rm", "ppo")]
    arguments = [*small(1)[1:], *(word for stage in stages for word in stage)]
    jobs = submit(cluster, workspace, *arguments, script="chain.sh", STAND_IN_FAILS="0:1:9")
    assert len(jobs) == 3
    assert exit_code(cluster.wait(jobs[0])) == 9, log(workspace)
    assert [cluster.wait(job)["JobState"] for job in jobs[1:]] == ["CANCELLED", "CANCELLED"]
    assert counts(workspace, "ppo") == []

    jobs = submit(cluster, workspace, *arguments, script="chain.sh")  # the first job continues from its count
    assert [cluster.wait(job)["JobState"] for job in jobs] == ["COMPLETED"] * 3, log(workspace)
    assert counts(workspace, "ppo") == [2, 2]
