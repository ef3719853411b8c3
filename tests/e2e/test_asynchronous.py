"""Run disaggregated engines under a real Ray. The numbers stay the same after engines, the job or Ray are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_mcore.rollout.remote.cluster import TOKEN_VARIABLE, Cluster
from rlhf_mcore.rollout.remote.head import SETTINGS
from tests.commands import ROOT, Started, environment, left_behind, run_command, start_command, wait_for
from tests.metric_names import assert_registered
from tests.tiny_training import make_mixture, make_quickstart

SMALL = [
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=4",
    "rollout.sampling.n=2",
    "rollout.sampling.max_new_tokens=12",
    "rollout.kv_cache_gib=0.02",
    "reward.function=reward.py:score",
    "evaluate.every=0",
    "evaluate.max_prompts=4",
    "checkpoint.save_steps=1",
    "logging.console=plain",
    "logging.trackers=[]",
    "logging.rollouts_every=1",
    "deterministic=true",
]
REWARD = """
import contextlib, os, signal

def score(data_source, solution_str, ground_truth, extra_info):
    with contextlib.suppress(FileNotFoundError):  # a test wants this process to be killed while others' responses are drawn
        os.rename("victim", "killed")
        os.kill(int(open("killed").read()), signal.SIGKILL)
    return (sum(map(ord, solution_str)) % 3) / 2  # differs between responses to two of three prompts
"""
# Metrics of a rank's time and of the schedule. All other metrics describe the learning.
OWN = (
    "timing/",
    "throughput/",
    "bridge/",
    "rollout/in_flight",
    "rollout/redrawn",
    "rollout/other_version",
    "rollout/staleness",
    "rollout/stale_",
)
# Samples come from a part of the vocabulary, which is recorded. Routes of experts are recorded too.
# Checkpoints store groups that wait for the next step.
FURTHER = [
    "model.path=mixture",
    "actor.router_replay=rollout",
    "algorithm.dynamic_sampling.enabled=true",
    "actor.freeze=[model.embed_tokens.weight]",
    "rollout.sampling.temperature=0.9",
    "rollout.sampling.top_p=0.95",
]
STEPS = 8
IN_ORDER = [
    f"trainer.num_steps={STEPS}",
    "trainer.max_staleness=2",
    "rollout.deterministic_order=true",
    "rollout.sampling.max_new_tokens=48",
    "rollout.engine_timeout_s=20",
    *FURTHER,
]


def command(config: str, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "rlhf_mcore.cli.main",
        "train",
        str(ROOT / "configs" / "quickstart" / config),
        *SMALL,
        *arguments,
    ]


def run(directory: Path, config: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(command(config, *arguments), directory, environment(directory))


def running(directory: Path, *arguments: str) -> AbstractContextManager[Started]:
    return start_command(command("async.yaml", *arguments), directory, environment(directory))


def processes_of(directory: Path, name: str = "") -> list[int]:
    """Return the processes whose temporary folder belongs to ``directory`` and whose command line contains ``name``."""
    found = []
    mark = f"TMPDIR={directory / 'tmp'}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes() and name in (path / "cmdline").read_bytes().decode():
                found.append(int(path.name))
        except OSError:  # the process has ended
            continue
    return found


def metrics(directory: Path, experiment: str) -> list[dict[str, Any]]:
    path = directory / "outputs" / "quickstart" / experiment / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in record.items() if not name.startswith(OWN)} for record in records]


def trained_on(directory: Path, experiment: str) -> list[str]:
    """Return the prompts of all steps, each as often as a step has trained on it."""
    folder = directory / "outputs" / "quickstart" / experiment / "rollouts"
    lines = [line for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]
    samples = Counter((record["step"], record["prompt_id"]) for record in map(json.loads, lines))
    assert set(samples.values()) == {2}
    return [prompt for _, prompt in samples]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("apart")
    make_quickstart(directory)
    make_mixture(directory)
    (directory / "reward.py").write_text(REWARD)
    return directory


@pytest.fixture(scope="module")
def whole(workspace: Path) -> Path:
    """Return the directory of an undisturbed run in order."""
    ended = run(workspace, "async.yaml", "experiment=whole", *IN_ORDER)
    assert ended.returncode == 0, ended.stderr
    return workspace / "outputs" / "quickstart" / "whole"


@pytest.mark.ci
def test_a_run_samples_ahead_on_an_engine_of_its_own_under_ray(workspace: Path, whole: Path) -> None:
    wanted = ("rollout/staleness_mean", "rollout/in_flight", "bridge/sent_bytes", "rollout/support_mass")
    assert_registered(whole, *wanted, "actor/route_mismatch")
    records = metrics(workspace, "whole")
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    assert records[1]["rollout/logprob_diff_max"] < 1e-4  # an older policy than the trained one samples later tokens
    (first, _), *_, (last, _) = ages(workspace, "whole")
    assert first == 0 < last <= 2 and all(others == 0 for _, others in ages(workspace, "whole"))
    assert any(record["rollout/num_batches"] > 1 for record in records[1:])  # dynamic sampling has dropped groups
    assert processes_of(workspace) == [] and left_behind(workspace) == []


def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(workspace: Path) -> None:
    """Each engine distributes its experts over two ranks."""
    both = ["trainer.world_size=2", "trainer.num_steps=3", "rollout.layout.tp=2", "rollout.layout.ep=2", *FURTHER]
    together = run(workspace, "grpo.yaml", "experiment=together", "actor.layout.tp=1", *both)
    assert together.returncode == 0, together.stderr
    ended = run(workspace, "async.yaml", "experiment=apart", "trainer.max_staleness=0", *both)
    assert ended.returncode == 0, ended.stderr
    assert metrics(workspace, "apart") == metrics(workspace, "together") and len(metrics(workspace, "apart")) == 4
    assert ended.stderr == "" and "ray" not in ended.stdout.lower().replace("array", "")
    assert processes_of(workspace) == [] and left_behind(workspace) == []
    folders = (workspace / "mixture", workspace / "outputs" / "quickstart" / "apart" / "latest" / "actor")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert [name for name in before if torch.equal(before[name], after[name])] == ["model.embed_tokens.weight"]


def test_fault_34_and_32_after_kills_of_the_job_and_of_ray_the_run_ends_as_if_nothing_had_happened(
    workspace: Path, whole: Path
) -> None:
    """The run also had fewer steps at first, so its last checkpoint contains samples for further steps."""
    with running(workspace, "experiment=killed", *IN_ORDER) as job:
        job.wait_for(lambda: len(metrics(workspace, "killed")) >= 2)
        job.process.kill()
        job.process.wait()
    wait_for(lambda: not processes_of(workspace), 60)  # neither ranks nor Ray processes
    fewer = run(workspace, "async.yaml", "experiment=killed", *IN_ORDER, "trainer.num_steps=3")
    assert fewer.returncode == 0, fewer.stderr
    with running(workspace, "experiment=killed", *IN_ORDER) as job:
        job.wait_for(lambda: len(metrics(workspace, "killed")) >= 5)
        [head] = processes_of(workspace, "gcs_server")
        os.kill(head, signal.SIGKILL)
        printed = job.end(120)
        wait_for(lambda: not processes_of(workspace), 60)
    assert job.process.returncode == 1, printed
    assert printed.count("Ray on this machine has ended") == 1 and "Traceback" not in printed
    ended = run(workspace, "async.yaml", "experiment=killed", *IN_ORDER)
    assert ended.returncode == 0, ended.stderr
    killed, expected = metrics(workspace, "killed"), metrics(workspace, "whole")
    for name in [name for name in killed[3] if name.startswith("evaluate/")]:  # the job's last step for a while
        del killed[3][name]
    assert killed == expected
    weights = [
        workspace / "outputs/quickstart" / name / "latest/actor/model.safetensors" for name in ("killed", "whole")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert left_behind(workspace) == []


@pytest.fixture
def cluster(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a Ray cluster that runs join."""
    for name, value in {**environment(workspace), **SETTINGS, TOKEN_VARIABLE: "0" * 64}.items():
        monkeypatch.setenv(name, value)
    made = Cluster(None, 1)
    yield made._start()
    made.close()


def test_fault_18_an_engine_is_killed_and_every_prompt_is_learned_from_once(workspace: Path, cluster: str) -> None:
    """The run joins a cluster, and so do the workers of its rewards."""
    arguments = ["experiment=churn", "rollout.num_engines=2", "trainer.num_steps=16", "rollout.engine_timeout_s=20"]
    arguments += [f"rollout.ray.address={cluster}", f"reward.pool={cluster}"]
    with running(workspace, *arguments, "trainer.max_staleness=3") as job:
        job.wait_for(lambda: len(metrics(workspace, "churn")) >= 2)
        os.kill(processes_of(workspace, "ray::EngineHost")[0], signal.SIGKILL)
        printed = job.end()
    assert job.process.returncode == 0, printed
    assert f"starting 2 engines at {cluster}" in printed
    assert printed.count("has failed and is started again") == 1 and "Traceback" not in printed
    learned = trained_on(workspace, "churn")
    assert len(learned) == len(set(learned)) == 16 * 4


def test_fault_36_in_order_an_engine_that_dies_or_stalls_changes_nothing(workspace: Path, whole: Path) -> None:
    """The engine is lost while it samples for a later step, after the trainer has published the weights of the next step."""
    with running(workspace, "experiment=lost", *IN_ORDER) as job:
        engine = engine_to_lose(workspace, "lost", job, 2)
        (workspace / "partial").write_text(str(engine))
        (workspace / "partial").rename(workspace / "victim")  # when the next response is scored
        engine = engine_to_lose(workspace, "lost", job, 4)
        os.kill(engine, signal.SIGSTOP)
        printed = job.end()
    assert job.process.returncode == 0 and "Traceback" not in printed, printed
    assert differences(workspace, "whole", "lost") == []
    assert printed.count("has failed and is started again") == 2, printed
    # The killed engine may have had no requests.
    assert re.search(r"its [1-9]\d* requests are drawn again: 0\.1\.[01] has not answered", printed), printed
    assert not (workspace / "victim").exists()


def ages(directory: Path, experiment: str) -> list[tuple[float, float]]:
    """Return for every step the mean staleness of its tokens, and the number of responses that another version sampled."""
    path = directory / "outputs" / "quickstart" / experiment / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines())
    return [(record["rollout/staleness_mean"], record["rollout/other_version"]) for record in records if record["step"]]


def differences(directory: Path, *experiments: str) -> list[str]:
    """Return the differences between two runs: steps with their metrics, the age of tokens, the last weights."""
    one, other = (metrics(directory, name) for name in experiments)
    folders = [directory / "outputs" / "quickstart" / name / "latest" / "actor" for name in experiments]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    found = [f"step {a['step']}" for a, b in zip(one, other, strict=True) if a != b]
    found += ["ages"] * (ages(directory, experiments[0]) != ages(directory, experiments[1]))
    return found + ["weights"] * (weights[0] != weights[1])


def engine_to_lose(directory: Path, experiment: str, job: Started, records: int) -> int:
    """Return the process of the engine once ``records`` records are written, before the next responses start."""
    job.wait_for(lambda: len(metrics(directory, experiment)) >= records - 1)
    found: list[int] = []
    job.wait_for(lambda: found.extend(processes_of(directory, "ray::EngineHost")) or found)
    path = directory / "outputs" / "quickstart" / experiment / "metrics.jsonl"
    while job.process.poll() is None and len(path.read_bytes().splitlines()) < records:
        time.sleep(0.002)
    return found[0]
