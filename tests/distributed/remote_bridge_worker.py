"""The trainer ranks of a bridge to engines in separate processes: layouts, faults, and engines that join and leave."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.run.endpoints import HostCopies
from rlhf_mcore.bridge.run.remote import BridgeJob, RemoteBridge, Side
from rlhf_mcore.bridge.run.sync import NoTarget
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.addresses import LOOPBACK
from rlhf_mcore.parallel.collectives import all_gather_json, broadcast_json, world_group
from rlhf_mcore.protocols import SyncStats
from tests.covering import covering_rows
from tests.distributed import models
from tests.distributed.engine_processes import EngineProcesses, count_resources, only_messages
from tests.distributed.setting import (
    LAYOUTS,
    MOE_LAYOUTS,
    UNEVEN_LAYOUTS,
    Settings,
    build,
    finish,
    groups_of,
    moe_groups_of,
    splits_of,
    start,
)

BUCKET_BYTES = 40_000
TIMEOUT_S = 8.0  # with three times as many busy processes as cores, 4 s were not always enough to join
CHANGES = 8
MODELS = {"uneven": "qwen3_seven", "layouts": "qwen3", "experts": "qwen3_moe"}


def layouts_of(part: str) -> list[tuple[str, bool]]:
    """Return layouts, and whether they use messages or shared memory. Each kind of split uses both transports."""
    names = {"uneven": [*UNEVEN_LAYOUTS], "layouts": [*LAYOUTS, "tp2_cp2"], "experts": [*MOE_LAYOUTS][:-1]}
    rows = covering_rows(
        {"layout": names[part], "by messages": (False, True)},
        features=lambda row: {**splits_of(row["layout"]), "by messages": row["by messages"]},
    )
    return [(row["layout"], row["by messages"]) for row in rows]


class Trainer:
    """The ranks of the world with a model, and on the first rank the control of the engines."""

    def __init__(self, directory: Path, name: str) -> None:
        self.platform, self.path = start(), directory / name
        self.groups: dict[str, ModelGroups] = {}
        if dist.get_rank() == 0:
            models.make(name, self.path)
        dist.barrier()
        self.file = str(self.path / "model.safetensors")
        shapes = {key: list(tensor.shape) for key, tensor in load_file(self.file).items()}
        self.engines = EngineProcesses(self.path, shapes) if dist.get_rank() == 0 else None
        self.has_experts = name in models.MOE_MODELS

    def model(self, layout: str) -> MegatronModel:
        groups = (moe_groups_of if self.has_experts else groups_of)(layout, self.groups)
        return build(self.path, groups, self.platform, Settings())[0]

    def bridge(
        self,
        model: MegatronModel,
        node: str = "",
        timeout_s: float = TIMEOUT_S,
        kept: HostCopies | None = None,
        **job: Any,
    ) -> RemoteBridge:
        geometry = model.spec.geometry
        assert set(hf_shapes(geometry)) == set(load_file(self.file))
        side = Side(model.local_parameters(), NoTarget(), node)
        return RemoteBridge(
            side,
            BridgeJob(geometry, **{"bucket_bytes": BUCKET_BYTES, "verify": True, "poison": True, **job}),
            world_group(),
            self.engines,
            address=LOOPBACK,
            timeout_s=timeout_s,
            kept=kept,
        )

    def first(self, action: Callable[[EngineProcesses], Any]) -> Any:
        """Run an action of the first rank with the engines. Returns its result on all ranks."""
        return broadcast_json(None if self.engines is None else action(self.engines), 0)

    def start(self, *names: str, node: str = "") -> None:
        self.first(lambda engines: [engines.start(name, node) for name in names])

    def end(self, *names: str) -> None:
        self.first(lambda engines: [engines.end(name) for name in names])

    def weights(self, *names: str, newer: Path | None = None) -> Any:
        """Return the wrong tensors of engines, their versions and their numbers of tensors."""
        given = {"path": self.file, "newer": None if newer is None else str(newer)}
        return self.first(lambda engines: [engines.ask(name, "weights", **given) for name in names])

    def answers(self) -> Any:
        return self.first(lambda engines: engines.answers)

    def close(self) -> None:
        if self.engines is not None:
            self.engines.close()


@contextmanager
def trainer(directory: Path, name: str) -> Iterator[Trainer]:
    made = Trainer(directory, name)
    try:
        yield made
    finally:
        made.close()


def list_bytes(stats: SyncStats) -> list[int]:
    return [stats.received_bytes, stats.local_bytes]


def layouts(run: Trainer, part: str) -> dict[str, Any]:
    """Sync all layouts to two engines, first through shared memory, then by messages."""
    found: dict[str, Any] = {}
    run.start("a", "b")
    for by_messages in (False, True):
        if by_messages:
            run.first(lambda engines: [engines.ask(name, "messages") for name in "ab"])
        with only_messages() if by_messages else nullcontext():
            names = [name for name, is_sent in layouts_of(part) if is_sent == by_messages]
            for version, layout in enumerate(names):
                bridge = run.bridge(run.model(layout))
                stats = all_gather_json(list_bytes(bridge.sync(version)))
                found[f"{layout}{' by messages' * by_messages}"] = {
                    "version": version,
                    "stats": stats,
                    "answers": run.answers(),
                    "weights": run.weights("a", "b"),
                }
                bridge.leave()
    run.end("a", "b")
    return found


def some_tensors(run: Trainer) -> dict[str, Any]:
    """Sync to two engines. Some tensors change, another engine joins, and some tensors change again."""
    newer, found = run.path / "newer.safetensors", {}
    model = run.model("tp2_pp2")
    bridge = run.bridge(model, changing=("model.norm.weight",))
    run.start("a", "b")
    bridge.sync(0)
    double_norm(model, newer, "model.norm.weight")
    bridge.sync(1)
    found["some"] = [run.answers(), run.weights("a", "b", newer=newer)]
    run.start("c")
    double_norm(model, newer, "model.norm.weight")
    bridge.sync(2)
    found["late"] = [run.answers(), run.weights("a", "b", "c", newer=newer)]
    double_norm(model, newer, "model.norm.weight")
    bridge.sync(3)
    found["again"] = [run.answers(), run.weights("a", "b", "c", newer=newer)]
    found["log"] = run.first(lambda engines: engines.log)
    bridge.leave()
    run.end("a", "b", "c")
    return found


def only_changes(run: Trainer) -> list[dict[str, Any]]:
    """Sync five times to two engines. The first sync sends everything, and so does the fourth, because an engine lost an element."""
    newer, found = run.path / "changes.safetensors", []
    model = run.model("tp2_pp2")
    kept = HostCopies({p.name: p.tensor.view(-1) for p in model.local_parameters()})
    bridge = run.bridge(model, kept=kept, full_every=100, verify=True, poison=False)
    run.start("a", "b")
    for version in range(5):
        if version:
            double_norm(model, newer, "model.norm.weight")
        if version == 3:
            run.first(lambda engines: engines.ask("b", "spoil"))
        stats = bridge.sync(version)
        found.append(
            {
                "sent": all_gather_json([stats.sent_bytes, stats.whole_bytes]),
                "answers": run.answers(),
                "weights": run.weights("a", "b", newer=newer if version else None),
            }
        )
    bridge.leave()
    run.end("a", "b")
    return found


def by_nixl(run: Trainer) -> dict[str, Any] | None:
    """Sync to engines on different machines that read messages, and then kill one of them. None: NIXL is not installed."""
    if find_spec("nixl") is None:
        return None
    model, found = run.model("tp2_pp2"), {}
    bridge = run.bridge(model, node="trainer", transport="nixl")
    run.start("a", "c", node="one")
    run.start("b", node="two")
    for version in range(2):
        stats = all_gather_json(list_bytes(bridge.sync(version)))
        found[f"sync {version}"] = {"stats": stats, "answers": run.answers(), "weights": run.weights("a", "b", "c")}
    run.first(lambda engines: engines.ask("b", "trouble", during="sync", at=2, kind="kill"))
    bridge.sync(2)
    found["killed"] = run.weights("a", "c")
    bridge.leave()
    run.end("a", "c")
    return found


def sent_again(run: Trainer) -> dict[str, Any]:
    """Lose an engine after an update of the model. Its successor receives the previous weights, and the next sync sends the update."""
    newer, found = run.path / "updated.safetensors", {}
    for is_static in (True, False):  # True as on a CPU, False as on a device
        model = run.model("tp2_pp2")
        parameters = model.local_parameters()
        kept = HostCopies({p.name: p.tensor.view(-1) for p in parameters})
        kept.is_static = is_static
        bridge = run.bridge(model, kept=kept)
        run.start("a")
        bridge.sync(0)
        for parameter in parameters:
            parameter.tensor *= 2
        run.end("a")
        run.start("b")
        bridge.sync_again()
        before = run.weights("b")
        bridge.sync(1)
        if dist.get_rank() == 0:
            save_file({name: tensor * 2 for name, tensor in load_file(run.file).items()}, newer)
        dist.barrier()
        found[f"static {is_static}"] = [before, run.weights("b", newer=newer)]
        bridge.leave()
        run.end("b")
    return found


def double_norm(model: MegatronModel, newer: Path, name: str) -> None:
    """Double a norm in the model and in the file with the expected weights."""
    parameters = {p.name: p.tensor for p in model.local_parameters()}
    if (held := parameters.get("decoder.final_layernorm.weight")) is not None:
        held *= 2
        if model.groups.collection.tp.rank() == 0:
            save_file({name: held.clone()}, newer)
    dist.barrier()


def faults(run: Trainer) -> list[dict[str, Any]]:
    """Let one of three engines fail while it joins or in the third bucket: it ends, stops or raises."""
    found = []
    model = run.model("tp2_pp2")
    run.start("a", "b")
    for number, (during, kind) in enumerate((d, k) for d in ("join", "sync") for k in ("kill", "stop", "raise")):
        bridge = run.bridge(model)
        name = f"bad{number}"
        run.start(name)
        if during == "sync":
            bridge.sync(100)
        at = 0 if during == "join" else 3
        run.first(lambda engines: engines.ask(name, "trouble", during=during, kind=kind, at=at))  # noqa: B023
        began = time.monotonic()
        stats = all_gather_json(list_bytes(bridge.sync(number)))
        found.append(
            {
                "case": [during, kind],
                "seconds": max(all_gather_json(time.monotonic() - began)),
                "stats": stats,
                "problems": bridge._problems,
                "weights": run.weights("a", "b"),
                "members": run.first(lambda engines: [process.engine for process in engines.pause()]),
            }
        )
        bridge.sync(number + 50)
        found[-1]["next"] = run.weights("a", "b")
        bridge.leave()
    run.end("a", "b")
    return found


def own_fault(run: Trainer) -> dict[str, Any]:
    """Let a trainer rank fail to send. All ranks raise, and engines have no weights. Without engines, a sync does nothing."""
    model = run.model("tp2_pp2")
    bridge = run.bridge(model)
    found: dict[str, Any] = {"alone": list_bytes(bridge.sync(0))}
    run.start("a")
    bridge.sync(1)
    begin = mock.patch.object(NoTarget, "begin", side_effect=ZeroDivisionError("by a test"))
    with begin if dist.get_rank() == 2 else nullcontext():
        try:
            bridge.sync(2)
            error = "none"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    found["errors"] = all_gather_json(error)
    found["answer"] = run.first(lambda engines: engines.finish(30))
    found["weights"] = run.weights("a")
    bridge.sync(3)
    found["after"] = run.weights("a")
    bridge.leave()
    run.end("a")
    return found


def nodes(run: Trainer) -> dict[str, Any]:
    """Sync from trainer ranks on two machines to an engine on the first machine, two on a third machine, and one on a fourth."""
    model = run.model("tp2_pp2")
    bridge = run.bridge(model, node="t0" if dist.get_rank() < 2 else "t1", bucket_bytes=120_000)
    for name, node in (("a", "t0"), ("b", "e"), ("c", "e"), ("d", "f")):
        run.start(name, node=node)
    bridge.sync(0)
    assert bridge._end is not None
    held = sum(p.tensor.numel() * 4 for p in model.local_parameters())
    found = {"answers": run.answers(), "weights": run.weights(*"abcd"), "held": all_gather_json(held)}
    bridge.leave()
    run.end(*"abcd")
    return found


def changes(run: Trainer) -> dict[str, Any]:
    """Keep one engine, and let another engine join and leave repeatedly."""
    model = run.model("tp2_pp2")
    bridge = run.bridge(model)
    run.start("a")
    found: dict[str, Any] = {"left": [], "wrong": []}
    for number in range(CHANGES + 4):
        if number % 2:
            run.start("b")
        bridge.sync(number)
        found["wrong"] += [w["wrong"] for w in run.weights("a")]
        if number % 2:
            run.end("b")
        elif number >= 4:
            gc.collect()
            time.sleep(0.1)  # threads of the last group end
            found["left"].append(
                [*all_gather_json(count_resources()), run.first(lambda engines: engines.ask("a", "left"))]
            )
    bridge.leave()
    run.end("a")
    return found


def main(directory: Path) -> None:
    findings: dict[str, Any] = {}
    for part, name in MODELS.items():
        with trainer(directory, name) as run:
            findings[part] = layouts(run, part)
            if part == "layouts":
                for check in (some_tensors, only_changes, by_nixl, sent_again, faults, own_fault, nodes, changes):
                    findings[check.__name__] = check(run)
    finish(findings, directory)
