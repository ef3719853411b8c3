"""Fleets of real engines under a real Ray. Weights come from files, because the bridge has separate tests."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig
from rlhf_mcore.protocols import GroupSpec
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.remote.cluster import Cluster
from rlhf_mcore.rollout.remote.fleet import Fleet
from rlhf_mcore.rollout.remote.fleet_state import FleetPlan
from rlhf_mcore.rollout.remote.host import EngineSpec
from rlhf_mcore.types import Job, Prompt, Sampling, Trajectory

MAX_MODEL_LEN = 160


class FileReceiver:
    """A receiver without a bridge. Version v is the model in the directory that the trainer names, for even or for odd versions.

    If the parent directory contains ``silent.<process id>``, the engine of that process steps without sampling. If it contains
    ``slow``, all engines wait before a step.
    """

    def __init__(self, target: Any) -> None:
        self.target, self.directories = target, [""]
        step = target.step

        def perhaps_silent() -> list[Any]:
            if (Path(self.directories[0]).parent / f"silent.{os.getpid()}").exists():
                threading.Event().wait(0.05)
                return []
            if (Path(self.directories[0]).parent / "slow").exists():
                threading.Event().wait(0.05)
            return list(step())

        target.step = perhaps_silent

    def join(self, spec: GroupSpec, bridge: str) -> None:
        self.directories = bridge.split(":")
        with (Path(self.directories[0]).parent / f"{spec.name}.pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        environment = Path(self.directories[0]).parent / f"{spec.name}.{spec.rank}.environment"
        environment.write_text(json.dumps(dict(os.environ)))

    def sync(self, version: int) -> None:
        import torch
        from safetensors.torch import load_file

        tensors = load_file(Path(self.directories[version % len(self.directories)], "model.safetensors"))
        with torch.no_grad():
            self.target.load_weights(iter(tensors.items()), version=version)

    def leave(self) -> None: ...


def plan(directory: Path, engine: str = "hf", num_engines: int = 1, tp: int = 1, **settings: Any) -> FleetPlan:
    """Return the plan of a fleet with the tiny model in ``directory``. ``episodes`` in ``settings``: the spec of its episodes."""
    episodes = settings.pop("episodes", None)
    limits = {"timeout_s": 20.0, "restarts": 3} | {
        k: settings.pop(k) for k in ("timeout_s", "restarts") if k in settings
    }
    cfg = RolloutConfig(engine=engine, layout=RolloutLayoutConfig(tp=tp), kv_cache_gib=0.125, **settings)
    model = EngineModel(str(directory), str(directory), "fp32", MAX_MODEL_LEN, seed=0)
    order = EngineSpec(cfg, model, FileReceiver, episodes)
    return FleetPlan(order, num_engines, tp, 1, slots=cfg.slots, sends_rows=episodes is not None, **limits)


@contextmanager
def running(fleet_plan: FleetPlan, cluster: Cluster | None = None) -> Iterator[tuple[Fleet, list[str]]]:
    """Start a fleet. Yields the fleet and its messages."""
    notes: list[str] = []
    fleet = Fleet(cluster or Cluster(None, 1), fleet_plan, notes.append)
    fleet.start()
    try:
        yield fleet, notes
    finally:
        fleet.close()


def publish(fleet: Fleet, version: int, *directories: Path, name: str = "group") -> list[str]:
    """Publish weights to all working engines. Returns the names of their processes."""
    members = fleet.pause()
    specs = [GroupSpec(name, "", 0, rank + 1, len(members) + 1, 60.0) for rank in range(len(members))]
    fleet.join(specs, ":".join(map(str, directories)))
    assert fleet.finish(60.0) == []
    fleet.begin_sync(version)
    assert fleet.finish(60.0) == []
    fleet.resume(version)
    return [member.process for member in members]


def jobs(prompts: int, samples: int, max_new_tokens: int = 24, first: int = 0, temperature: float = 1.0) -> list[Job]:
    """Return single-turn jobs for ``prompts`` prompts with ``samples`` samples each. Numbers count from ``first``."""
    sampling = Sampling(n=samples, max_new_tokens=max_new_tokens, temperature=temperature)
    rows = [[3 + (11 * row + 5 * i) % 90 for i in range(8 + row)] for row in range(prompts)]
    made = [Prompt(f"{row}", row, ids, "") for row, ids in enumerate(rows)]
    return [
        Job(first + prompt.index * samples + sample, prompt, sample, sampling, 1, is_single_turn=True)
        for prompt in made
        for sample in range(samples)
    ]


def begin(fleet: Fleet, started: Sequence[Job]) -> dict[int, Future[Trajectory]]:
    """Start jobs. Returns the futures of their trajectories by number."""
    return dict(zip([job.number for job in started], fleet.begin(started), strict=True))


def finished_of(futures: Mapping[int, Future[Trajectory]]) -> dict[int, Trajectory]:
    """Return the trajectories of the jobs that have finished, by number."""
    return {number: future.result() for number, future in futures.items() if future.done()}


def collect(
    fleet: Fleet, futures: Mapping[int, Future[Trajectory]], *directories: Path, version: int = 0
) -> dict[int, Trajectory]:
    """Wait for all trajectories. If all engines are lost, their successors receive the weights of ``version``."""
    while wait(futures.values(), 1.0).not_done:
        if fleet.needs_weights():
            publish(fleet, version, *directories)
    return finished_of(futures)


def tokens(finished: Mapping[int, Trajectory]) -> dict[int, list[int]]:
    """Return the sampled tokens by number."""
    return {number: trajectory.sampled_ids.tolist() for number, trajectory in finished.items()}
