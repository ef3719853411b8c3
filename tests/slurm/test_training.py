"""A real training on a real SLURM: told to stop before its time limit, it comes back by itself and ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.layout import scan
from tests.processes import wait_for
from tests.slurm.cluster import Cluster
from tests.tiny_training import CONFIG, SMALL, assert_same_end, make, run_directory, run_locally


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("training")
    make(directory)
    return directory


def test_a_job_that_came_back_ends_with_the_weights_of_one_that_was_left_alone(cluster: Cluster, made: Path) -> None:
    cluster.environment.pop("RLHF_MCORE_MODULE", None)
    options = ["--nodes", "2", "--ranks-per-node", "1", "--time", "10"]
    job_id = cluster.run("submit.sh", CONFIG, *SMALL, "experiment=cut", *options, cwd=made).stdout.strip()
    log = made / "outputs" / "slurm" / f"grpo-{job_id}.out"
    cut = run_directory(made, "cut")
    wait_for(lambda: scan(cut), 240, lambda: log.read_text() if log.exists() else "no log")
    cluster.run("scancel", "--batch", "--signal=USR1", job_id)
    job = cluster.wait(job_id, 300)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), log.read_text()
    assert_same_end(cut, run_locally(made, "whole", cluster.environment))
