"""Engines of their own under a real Ray, as a user has them: what they change, and what may happen to them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_mcore.rollout.remote.cluster import TOKEN_VARIABLE, Cluster
from rlhf_mcore.rollout.remote.control import ask
from rlhf_mcore.rollout.remote.head import SETTINGS
from tests.commands import ROOT, Started, environment, finished, left_behind, started, wait_for
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
    "logging.tensorboard=false",
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
# Of a rank's time and of what the schedule counts; all else is what was learned.
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
# Drawn from a part of the vocabulary, which is recorded, as are the experts of tokens, and with what waits for the next step in
# checkpoints.
FURTHER = [
    "model.path=mixture",
    "actor.router_replay=rollout",
    "algorithm.dynamic_sampling.enabled=true",
    "actor.freeze=[model.embed_tokens.weight]",
    "rollout.sampling.temperature=0.9",
    "rollout.sampling.top_p=0.95",
]
IN_ORDER = ["trainer.max_staleness=2", "rollout.deterministic_order=true", "trainer.num_steps=6", *FURTHER]


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
    return finished(command(config, *arguments), directory, environment(directory))


def running(directory: Path, *arguments: str) -> AbstractContextManager[Started]:
    return started(command("async.yaml", *arguments), directory, environment(directory))


def processes_of(directory: Path, name: str = "") -> list[int]:
    """What runs with the temporary folder of ``directory``, and has ``name`` in its command line."""
    found = []
    mark = f"TMPDIR={directory / 'tmp'}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes() and name in (path / "cmdline").read_bytes().decode():
                found.append(int(path.name))
        except OSError:  # it has ended
            continue
    return found


def metrics(directory: Path, experiment: str) -> list[dict[str, Any]]:
    path = directory / "outputs" / "quickstart" / experiment / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in record.items() if not name.startswith(OWN)} for record in records]


def trained_on(directory: Path, experiment: str) -> list[str]:
    """The prompts of all steps, each as often as a step has learned from it."""
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
def whole(workspace: Path) -> list[dict[str, Any]]:
    """The metrics of a run in order that nothing has happened to."""
    ended = run(workspace, "async.yaml", "experiment=whole", *IN_ORDER)
    assert ended.returncode == 0, ended.stderr
    run_directory = workspace / "outputs" / "quickstart" / "whole"
    wanted = ("rollout/staleness_mean", "rollout/in_flight", "bridge/sent_bytes", "rollout/support_mass")
    assert_registered(run_directory, *wanted, "actor/route_mismatch")
    return metrics(workspace, "whole")


def test_without_staleness_it_is_the_synchronous_run_bit_for_bit(workspace: Path) -> None:
    """Engines have experts on two ranks each."""
    both = ["trainer.world_size=2", "trainer.num_steps=3", "rollout.layout.tp=2", "rollout.layout.ep=2", *FURTHER]
    assert run(workspace, "grpo.yaml", "experiment=together", "actor.layout.tp=1", *both).returncode == 0
    ended = run(workspace, "async.yaml", "experiment=apart", "trainer.max_staleness=0", *both)
    assert ended.returncode == 0, ended.stderr
    assert metrics(workspace, "apart") == metrics(workspace, "together") and len(metrics(workspace, "apart")) == 4
    assert ended.stderr == "" and "ray" not in ended.stdout.lower().replace("array", "")
    assert processes_of(workspace) == [] and left_behind(workspace) == []
    folders = (workspace / "mixture", workspace / "outputs" / "quickstart" / "apart" / "latest" / "actor")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert [name for name in before if torch.equal(before[name], after[name])] == ["model.embed_tokens.weight"]


def test_fault_34_killed_at_any_time_it_ends_as_if_it_had_not_been(
    workspace: Path, whole: list[dict[str, Any]]
) -> None:
    """It had fewer steps first: what was sampled for further ones is in its last checkpoint."""
    with running(workspace, "experiment=killed", *IN_ORDER) as job:
        job.wait_for(lambda: len(metrics(workspace, "killed")) >= 2)
        job.process.kill()
        job.process.wait()
    wait_for(lambda: not processes_of(workspace), 60)  # neither ranks nor anything of Ray
    assert run(workspace, "async.yaml", "experiment=killed", *IN_ORDER, "trainer.num_steps=4").returncode == 0
    ended = run(workspace, "async.yaml", "experiment=killed", *IN_ORDER)
    assert ended.returncode == 0, ended.stderr
    killed = metrics(workspace, "killed")
    at_its_end = {name for name in killed[4] if name.startswith("evaluate/")}  # where it had 4 steps
    assert [
        {name: record[name] for name in record.keys() - (at_its_end if record["step"] == 4 else set())}
        for record in killed
    ] == whole
    assert any(record["rollout/num_batches"] > 1 for record in whole[1:])
    weights = [
        workspace / "outputs/quickstart" / name / "latest/actor/model.safetensors" for name in ("killed", "whole")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert left_behind(workspace) == []


@pytest.fixture
def cluster(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray that runs join."""
    for name, value in {**environment(workspace), **SETTINGS, TOKEN_VARIABLE: "0" * 64}.items():
        monkeypatch.setenv(name, value)
    made = Cluster(None, 1)
    yield made._start()
    made.close()


def test_fault_18_engines_are_killed_and_every_prompt_is_learned_from_once(workspace: Path, cluster: str) -> None:
    """In a cluster that the run joins, with the workers of its rewards."""
    arguments = ["experiment=churn", "rollout.num_engines=2", "trainer.num_steps=24", "rollout.engine_timeout_s=20"]
    arguments += [f"rollout.ray.address={cluster}", f"reward.ray.address={cluster}", "reward.pool=ray"]
    with running(workspace, *arguments, "trainer.max_staleness=3") as job:
        killed = 0  # the last one long before the end: steps are made as fast as a tenth of a second
        for records in (2, 4, 6):
            job.wait_for(lambda records=records: len(metrics(workspace, "churn")) >= records)
            job.wait_for(lambda: processes_of(workspace, "ray::EngineHost"))  # both may be lost, or start again
            os.kill(processes_of(workspace, "ray::EngineHost")[0], signal.SIGKILL)
            killed += 1
        printed = job.end()
    assert job.process.returncode == 0 and killed == 3, printed
    assert f"starting 2 engines at {cluster}" in printed
    assert printed.count("has failed and is started again") >= 1 and "Traceback" not in printed
    learned = trained_on(workspace, "churn")
    assert len(learned) == len(set(learned)) == 96


def test_fault_32_without_ray_the_run_ends_with_one_message(workspace: Path, whole: list[dict[str, Any]]) -> None:
    arguments = ["experiment=headless", *IN_ORDER]
    with running(workspace, *arguments) as job:
        job.wait_for(lambda: len(metrics(workspace, "headless")) >= 3)
        [head] = processes_of(workspace, "gcs_server")
        os.kill(head, signal.SIGKILL)
        printed = job.end(120)
        wait_for(lambda: not processes_of(workspace), 60)
    assert job.process.returncode == 1, printed
    assert printed.count("Ray on this machine has ended") == 1 and "Traceback" not in printed
    assert run(workspace, "async.yaml", *arguments).returncode == 0
    assert metrics(workspace, "headless") == whole


ONE_OFF = ["trainer.max_staleness=1", "rollout.deterministic_order=true", "rollout.sampling.max_new_tokens=48"]


def ages(directory: Path, experiment: str) -> list[tuple[float, float]]:
    """Mean staleness of every step's tokens, and how many responses another version has drawn."""
    path = directory / "outputs" / "quickstart" / experiment / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines())
    return [(record["rollout/staleness_mean"], record["rollout/other_version"]) for record in records if record["step"]]


def differences(directory: Path, *experiments: str) -> list[str]:
    """What differs between two runs: steps and their metrics, files of the last weights."""
    one, other = (metrics(directory, name) for name in experiments)
    folders = [directory / "outputs" / "quickstart" / name / "latest" / "actor" for name in experiments]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    found = [f"step {a['step']}" for a, b in zip(one, other, strict=True) if a != b]
    found += ["ages"] * (ages(directory, experiments[0]) != ages(directory, experiments[1]))
    return found + ["weights"] * (weights[0] != weights[1])


@pytest.mark.parametrize(
    "layout",
    [(), pytest.param(("rollout.layout.dp=2", "rollout.layout.ep=2"), marks=pytest.mark.matrix, id="two groups")],
)
def test_fault_36_in_order_an_engine_that_dies_or_stalls_changes_nothing(
    workspace: Path, layout: tuple[str, ...]
) -> None:
    """It is lost while it draws for the next step, whose policy the trainer has updated when another engine is there.

    Of an engine of two ranks the one or the other is lost, which share the experts and attend to requests of their own.
    """
    arguments = [*ONE_OFF, "trainer.num_steps=6", "rollout.engine_timeout_s=20", *layout]
    arguments += ["model.path=mixture"] * bool(layout)
    calm_name, name = f"calm-{len(layout)}", f"lost-{len(layout)}"
    calm = run(workspace, "async.yaml", f"experiment={calm_name}", *arguments)
    assert calm.returncode == 0, calm.stderr
    with running(workspace, f"experiment={name}", *arguments) as job:
        ranks = engine_to_lose(workspace, name, job, 2)
        (workspace / "partial").write_text(str(ranks[0]))
        (workspace / "partial").rename(workspace / "victim")  # when the next response is scored
        ranks = engine_to_lose(workspace, name, job, 4)
        os.kill(ranks[-1], signal.SIGSTOP)
        printed = job.end()
    assert job.process.returncode == 0 and "Traceback" not in printed, printed
    assert differences(workspace, calm_name, name) == []
    assert printed.count("has failed and is started again") == 2, printed
    # The one that was killed may have had fewer, or none.
    assert re.search(r"its 8 requests are drawn again: 0\.1\.[01] has not answered", printed), printed
    assert ages(workspace, calm_name) == [(0, 0)] + [(1, 0)] * 5 and not (workspace / "victim").exists()


def engine_to_lose(directory: Path, experiment: str, job: Started, records: int) -> list[int]:
    """The processes of engines when so many records are written, before the next responses begin."""
    job.wait_for(lambda: len(metrics(directory, experiment)) >= records - 1)
    found: list[int] = []
    job.wait_for(lambda: found.extend(processes_of(directory, "ray::EngineHost")) or found)
    path = directory / "outputs" / "quickstart" / experiment / "metrics.jsonl"
    while job.process.poll() is None and len(path.read_bytes().splitlines()) < records:
        time.sleep(0.002)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["dp=2", "dp=2 ep=2", "pp=2", "tp=2 pp=2 ep=2", "tp=2 dp=2 ep=4"])
def test_engines_that_are_cut_otherwise_are_colocated_or_not_bit_for_bit(workspace: Path, layout: str) -> None:
    keys = [f"rollout.layout.{size}" for size in layout.split()]
    world = f"trainer.world_size={4 if 'tp=2' in layout else 2}"
    both = ["model.path=mixture", "trainer.num_steps=3", "bridge.verify=digest", world, *keys]
    names = [f"{placement} {layout}" for placement in ("together", "apart")]
    assert run(workspace, "grpo.yaml", f"experiment={names[0]}", "actor.layout.tp=1", *both).returncode == 0
    ended = run(workspace, "async.yaml", f"experiment={names[1]}", "trainer.max_staleness=0", *both)
    assert ended.returncode == 0, ended.stderr
    assert metrics(workspace, names[1]) == metrics(workspace, names[0]) and len(metrics(workspace, names[1])) == 4
    assert all(record["rollout/logprob_diff_max"] < 1e-5 for record in metrics(workspace, names[1])[1:])
    assert processes_of(workspace) == [] and left_behind(workspace) == []


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_fault_18_ten_random_kills_of_engines(workspace: Path) -> None:
    arguments = ["experiment=ten", "rollout.num_engines=2", "trainer.num_steps=120", "rollout.engine_restarts=10"]
    chance = random.Random(0)
    with running(workspace, *arguments, "trainer.max_staleness=3", "checkpoint.save_steps=50") as job:
        for records in sorted(chance.sample(range(2, 90), 10)):  # by steps: seconds would outlast a fast machine's run
            job.wait_for(lambda records=records: len(metrics(workspace, "ten")) >= records)
            time.sleep(chance.uniform(0, 0.5))
            job.wait_for(lambda: processes_of(workspace, "ray::EngineHost"))
            os.kill(chance.choice(processes_of(workspace, "ray::EngineHost")), signal.SIGKILL)
        printed = job.end(3000)
    assert job.process.returncode == 0 and "Traceback" not in printed, printed
    learned = trained_on(workspace, "ten")
    assert len(learned) == len(set(learned)) == 480


MISHAPS = ("kill", "kill", "kill twice", "stall", "stall and go on", "drain", "remove", "kill the run too")


@pytest.mark.matrix
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("num_engines", [1, 2])
def test_fault_36_in_order_twenty_mishaps_of_engines_change_nothing(workspace: Path, num_engines: int) -> None:
    """Kills, stalls and departures at random instants; with two engines prompts are dropped, and evaluations come between."""
    arguments = [*ONE_OFF, f"rollout.num_engines={num_engines}", "trainer.num_steps=150", "checkpoint.save_steps=4"]
    arguments += ["rollout.engine_timeout_s=15", "rollout.engine_restarts=10", "checkpoint.save_total_limit=2"]
    if num_engines > 1:
        arguments += [*FURTHER, "trainer.max_staleness=2", "evaluate.every=3"]
    calm, other = f"calm{num_engines}", f"mishaps{num_engines}"
    ended = finished(command("async.yaml", *arguments, f"experiment={calm}"), workspace, environment(workspace), 1200)
    assert ended.returncode == 0, ended.stderr
    chance, kinds, printed, is_killed = random.Random(num_engines), [*MISHAPS, *MISHAPS, *MISHAPS[:4]], "", True
    while is_killed:
        with running(workspace, *arguments, f"experiment={other}") as job:
            is_killed = False
            while kinds and not is_killed:
                is_killed = have_mishap(job, workspace, other, chance, kinds.pop(0))
            if is_killed:
                job.process.kill()
            printed += job.end(1200)
        wait_for(lambda: not processes_of(workspace), 60)
    assert job.process.returncode == 0 and "Traceback" not in printed, printed[-6000:]
    again = [int(number) for number in re.findall(r"its (\d+) requests are drawn again", printed)]
    found = differences(workspace, calm, other)
    print(f"{num_engines} engines: 20 mishaps, {len(again)} with requests in flight, {len(found)} differences")
    assert found == [] and again


def have_mishap(job: Started, directory: Path, name: str, chance: random.Random, kind: str) -> bool:
    """Let something happen to an engine some steps from here. Whether the run is to be killed then."""
    step = len(metrics(directory, name)) + chance.randint(1, 4)
    job.wait_for(lambda: len(metrics(directory, name)) >= step, 600)
    time.sleep(chance.uniform(0, 0.4))
    job.wait_for(lambda: processes_of(directory, "ray::EngineHost"))
    if kind in ("drain", "remove"):
        change_engines(job, directory / "outputs" / "quickstart" / name, kind)
        return False
    victim = chance.choice(processes_of(directory, "ray::EngineHost"))
    os.kill(victim, signal.SIGSTOP if "stall" in kind else signal.SIGKILL)

    def again() -> None:
        with suppress(ProcessLookupError):
            if "stall" in kind:
                os.kill(victim, signal.SIGCONT)  # before it is given up, or behind
            for engine in processes_of(directory, "ray::EngineHost")[:1] if "kill" in kind else []:
                os.kill(engine, signal.SIGKILL)  # while it starts, gets weights or draws

    if kind in ("kill twice", "stall and go on"):
        Timer(chance.uniform(1, 25), again).start()
    elif kind == "kill the run too":
        time.sleep(chance.uniform(0, 3))
        return True
    return False


def change_engines(job: Started, directory: Path, command: str) -> None:
    """Let an engine leave, and another one come: before it where it is the only one, else behind, where there is room for it."""
    first = [found["name"] for found in ask(directory, "list")]
    if len(first) == 1:
        ask(directory, "add", number=1)
    ask(directory, command, name=first[0])
    if len(first) > 1:
        job.wait_for(lambda: first[0] not in [found["name"] for found in ask(directory, "list")])
        ask(directory, "add", number=1)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_fault_34_ten_random_kills_of_the_job(workspace: Path) -> None:
    config = str(ROOT / "configs" / "quickstart" / "async.yaml")
    arguments = [*SMALL, *IN_ORDER, "trainer.num_steps=150", "experiment=x", "checkpoint.save_total_limit=2"]
    chaos = [sys.executable, str(ROOT / "tools" / "chaos.py"), config, *arguments]
    kills = ["--kills", "10", "--latest", "10", "--after-save", "half"]
    done = finished([*chaos, *kills], workspace, environment(workspace), 3500)
    assert done.returncode == 0 and "10 kills, 0 differences" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert left_behind(workspace) == []
