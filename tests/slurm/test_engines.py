"""Train with engines on separate nodes of a real SLURM job. Ray starts and ends with the job, and the trainer joins it."""

from __future__ import annotations

import fcntl
from pathlib import Path

from tests.commands import processes_with, wait_for
from tests.slurm.cluster import MINUTES, Cluster
from tests.tiny_training import CONFIG, SMALL, make, run_directory, run_locally

ENGINES = ["rollout.placement=disaggregated", "rollout.num_engines=2", "actor.layout.tp=1"]


def test_engines_under_ray_on_their_nodes_train_as_those_of_the_trainer_do(cluster: Cluster, tmp_path: Path) -> None:
    make(tmp_path)
    before = set(Path("/tmp").glob("rlhf-ray-*"))
    options = ["--nodes", "1", "--engine-nodes", "2", "--ranks-per-node", "1", "--time", MINUTES]
    job_id = cluster.run(
        "submit.sh", CONFIG, *SMALL, *ENGINES, "experiment=apart", *options, cwd=tmp_path
    ).stdout.strip()
    log = tmp_path / "outputs" / "slurm" / f"grpo-{job_id}.out"
    whole = run_locally(tmp_path, "whole", cluster.environment, "actor.layout.tp=1", "trainer.world_size=1")
    job = cluster.wait(job_id)
    assert (job["JobState"], job["Restarts"], job["NumNodes"]) == ("COMPLETED", "0", "3"), log.read_text()
    assert "Ray's head is at 127.0.0.1:" in log.read_text() and "engines on n2 n3" in log.read_text()
    for name in sorted(path.name for path in (whole / "latest" / "actor").glob("*.safetensors")):
        apart = run_directory(tmp_path, "apart") / "latest" / "actor" / name
        assert apart.read_bytes() == (whole / "latest" / "actor" / name).read_bytes()
    wait_for(lambda: not processes_with("SLURM_JOB_ID", job_id))
    wait_for(lambda: not [folder for folder in set(Path("/tmp").glob("rlhf-ray-*")) - before if is_free(folder)])


def is_free(folder: Path) -> bool:
    """Return whether no process locks a Ray folder. Other jobs may use folders at the same time."""
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return folder.exists()
    return True
