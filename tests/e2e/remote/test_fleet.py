"""A fleet under a real Ray: an engine of two ranks, responses across a sync, and leftovers of a kill."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_processes import has_ended
from rlhf_mcore.rollout.remote.cluster import Cluster
from tests.commands import ROOT, descendants, start_command, wait_for
from tests.e2e.processors import ALL_REDUCE
from tests.e2e.remote.fleets import begin, collect, jobs, plan, publish, running
from tests.e2e.rollout.drawing import logprobs_across_a_sync
from tests.e2e.rollout.tiny import save_model
from tests.messages import expect_error

NEW_TOKENS = 120


def shared_memory_of(pid: int) -> set[str]:
    """Names that memory of a process has, or had."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {
        f"/dev/shm/{line.partition('/dev/shm/')[2].removesuffix(' (deleted)')}" for line in lines if "/dev/shm/" in line
    }


# What torchrun gives to the trainer's first rank, and a Ray that it starts inherits.
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}


def test_an_engine_of_two_ranks_goes_on_with_new_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray here believes that there are GPUs: its processes get the variables that they would get of it beside real ones."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        save_model(tmp_path / name, "qwen3", seed)
    capfd.readouterr()
    directories = tmp_path / "a", tmp_path / "b"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(None, 1, gpus=1, own_gpus=["5", "3"])
    with running(plan(directories[0], "vllm", tp=2, at_publish="resubmit"), cluster) as (fleet, notes):
        assert publish(fleet, 0, *directories) == ["0.0.0", "0.0.1"]
        ranks = [json.loads((tmp_path / f"group.{rank}.environment").read_text()) for rank in (1, 2)]
        assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} in ({"5,3"}, {"3,5"})
        assert len({rank["MASTER_PORT"] for rank in ranks}) == 1 and ranks[0]["MASTER_PORT"] != TORCHRUN["MASTER_PORT"]
        assert [tuple(rank[name] for name in TORCHRUN)[:4] for rank in ranks] == [
            ("0", "0", "2", "127.0.0.1"),
            ("1", "1", "2", "127.0.0.1"),
        ]
        asked = jobs(3, 2, NEW_TOKENS)
        futures = begin(fleet, asked)
        while fleet.status()[0].tokens < 60:  # reported at least every second
            time.sleep(0.05)
        publish(fleet, 1, *directories)
        drawn = collect(fleet, futures, *directories)
        ready, kernels = notes
        assert ready.startswith("engine 0 is ready after ") and ready.endswith(" s, at 127.0.0.1")
        assert kernels == f"engine 0: kernels: engine attention CPU_ATTN, engine all-reduce {ALL_REDUCE}"
    assert capfd.readouterr() == ("", "")
    before, after = (AutoModelForCausalLM.from_pretrained(found).eval() for found in directories)
    synced = 0
    for job in asked:
        found, start = drawn[job.number], len(job.prompt_ids)
        if len(found.versions) == 1:  # it has ended before
            assert found.versions == ((start, 0),)
            continue
        [(_, old), (first, new)] = found.versions
        assert (old, new) == (0, 1)
        expected = logprobs_across_a_sync(
            before, after, job.prompt_ids, found.sampled_ids.tolist(), first - start, recompute=True
        )
        assert found.sampled_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
        synced += 1
    assert synced > 0


TRAINER = """
import os, sys, time
from pathlib import Path
from tests.commands import descendants
from tests.e2e.remote.fleets import jobs, plan, publish, running

directory = Path(sys.argv[1])
with running(plan(directory, num_engines=2)) as (fleet, _):
    publish(fleet, 0, directory)
    fleet.begin(jobs(4, 4, 140))
    (directory / "unfinished").write_text(str(fleet._machines._head.pid))
    (directory / "unfinished").rename(directory / "head")
    time.sleep(600)
"""


def test_nothing_of_ray_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", 1)
    secret = {"HF_TOKEN": "a-secret-of-the-trainer", "TMPDIR": "/tmp"}
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    with start_command(command, tmp_path, {**os.environ, **secret, "PYTHONPATH": str(ROOT)}) as trainer:
        trainer.wait_for(lambda: (tmp_path / "head").exists())
        head = int((tmp_path / "head").read_text())
        of_ray = [head, *descendants(head)]
        commands = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in of_ray)
        [folder] = [folder for folder in Path("/tmp").glob("rlhf-ray-*") if str(folder) in commands]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700  # Ray opens its own to everybody
        look_at_and_stop_one(trainer.process.pid, of_ray, tmp_path)
        trainer.process.kill()
        trainer.process.wait()
    wait_for(lambda: not [pid for pid in of_ray if not has_ended(pid)], 60)
    assert not folder.exists()


def look_at_and_stop_one(trainer: int, of_ray: list[int], directory: Path) -> None:
    """Its engines have no secret, nothing of it listens beyond this machine; one engine is stopped."""
    [*engines] = [int(pid) for pid in (directory.parent / "group.pids").read_text().split()]
    assert set(engines) < set(of_ray)
    for pid in engines:
        seen = Path(f"/proc/{pid}/environ").read_text()
        assert "RAY_AUTH_TOKEN" in seen and "a-secret-of-the-trainer" not in seen
    listening = subprocess.run(["ss", "-tlnpH"], capture_output=True, text=True).stdout.splitlines()
    own = [line for line in listening if any(f"pid={pid}," in line for pid in [trainer, *of_ray])]
    assert own and all("127.0.0.1" in line.split()[3] for line in own), own
    assert not [line for line in own if line.split()[3].endswith(":8265")], "the dashboard is off"
    os.kill(engines[0], signal.SIGSTOP)


def test_a_cluster_is_joined_with_its_token_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = Cluster(None, 1)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with expect_error(ConfigError, field="rollout.ray.address", remedy="RAY_AUTH_MODE=token"):
        Cluster("127.0.0.1:6", 1).connect()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(ConfigError, match=r"rollout\.ray\.address=127\.0\.0\.1:6: nobody answers there"):
        Cluster("127.0.0.1:6", 1).connect()
    address = cluster._start()
    try:
        joined = subprocess.run(
            [sys.executable, "-c", JOIN, address],
            capture_output=True,
            text=True,
            env={**os.environ, "RAY_AUTH_TOKEN": "1" * 64},
        )
        assert joined.stdout.startswith(f"rollout.ray.address={address}: "), joined
        assert "RAY_AUTH_TOKEN is not the token of this cluster" in joined.stdout, joined
        joined = subprocess.run([sys.executable, "-c", JOIN, address], capture_output=True, text=True)
        assert joined.stdout == "joined\n", joined
        assert joined.stderr == ""
    finally:
        cluster.close()


JOIN = """
import sys
from rlhf_mcore.rollout.remote.cluster import Cluster

cluster = Cluster(sys.argv[1], 1)
try:
    cluster.connect()
    print("joined")
except ValueError as error:
    print(error)
cluster.close()
"""
