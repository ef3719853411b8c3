"""Check that a training on a real SLURM is requeued before its time limit and ends with the weights of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.layout import scan
from tests.commands import wait_for
from tests.slurm.cluster import MINUTES, Cluster
from tests.tiny_training import CONFIG, SMALL, STEPS, assert_same_end, make, run_directory, run_locally


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("training")
    make(directory)
    return directory


def test_a_job_that_came_back_ends_with_the_weights_of_one_that_was_left_alone(
    cluster: Cluster, workspace: Path
) -> None:
    options = ["--nodes", "2", "--ranks-per-node", "1", "--time", MINUTES, "--signal-before", "30"]
    job_id = cluster.run("submit.sh", CONFIG, *SMALL, "experiment=cut", *options, cwd=workspace).stdout.strip()
    log, cut, hold = (
        workspace / "outputs" / "slurm" / f"grpo-{job_id}.out",
        run_directory(workspace, "cut"),
        workspace / "hold",
    )
    cluster.wait_for(lambda: scan(cut), job_id, lambda: log.read_text() if log.exists() else "no log")
    hold.touch()
    # SIGUSR1 is now due. SLURM checks twice a minute, so the signal arrives in the middle of a step.
    cluster.run("scontrol", "update", f"JobId={job_id}", "TimeLimit=1")
    wait_for(lambda: "SIGUSR1" in log.read_text(), 110, log.read_text)  # beyond 120 s the step ends by itself
    hold.unlink()
    job = cluster.wait(job_id, state=("COMPLETING", "PENDING"))
    assert job["Restarts"] == "1" and len(scan(cut)) < STEPS, log.read_text()
    cluster.run("scontrol", "update", f"JobId={job_id}", f"TimeLimit={MINUTES}")  # so that it is requeued only once
    job = cluster.wait(job_id)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert_same_end(cut, run_locally(workspace, "whole", cluster.environment))
