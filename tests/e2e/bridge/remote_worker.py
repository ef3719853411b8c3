"""Two trainer ranks under torchrun that send weights to vLLM engines in separate processes. test_remote.py asserts on the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.run.remote import BridgeJob, RemoteBridge, Side
from rlhf_mcore.bridge.run.sync import NoTarget
from rlhf_mcore.families.quantised import QUANTISATIONS
from rlhf_mcore.mcore.mtp import MTPLearning
from rlhf_mcore.parallel.addresses import LOOPBACK
from rlhf_mcore.parallel.collectives import broadcast_json, world_group
from tests.distributed import models
from tests.distributed.engine_processes import EngineProcesses, start_process
from tests.distributed.setting import Settings, build, finish, groups_of, moe_groups_of, start
from tests.e2e.rollout.tiny import save_tokenizer
from tests.unit.bridge.eight_bits import slow_values

# Names of layouts of four ranks: two ranks have half of the data-parallel size. The last one finds live weights in the engines.
# Behind a slash: the 8 bits in which weights travel.
LAYOUTS = {
    "qwen3_tied": ("dp4", "tp2_dp2_sp", "pp2_vpp2_dp2"),
    "qwen3_moe": ("ep2_dp4", "tp2_sp_ep2_etp1_dp2", "tp2_sp_ep2_etp1_dp2/fp8", "ep2_dp4/int8"),
    "glm4_moe": ("tp2_sp_ep2_etp1_dp2",),
}
ENGINES = {
    "qwen3_tied": {"a": {"tp": 2}, "b": {"tp": 2}},
    "qwen3_moe": {"c": {"dp": 2, "ep": 2}},
    "glm4_moe": {"d": {"tp": 2}},
}
NUM_RANKS = 2  # per engine
WITH_MTP = ("glm4_moe",)  # engines draft with a trained MTP layer


def engines_of(name: str, path: Path) -> EngineProcesses:
    """Return each engine of a model with its layout of processes."""
    engines = EngineProcesses(path)
    orders = [
        {"engine": engine, "rank": rank, "layout": layout, "model": str(path), "store": str(path)}
        for engine, layout in ENGINES[name].items()
        for rank in range(NUM_RANKS)
    ]
    start_process([str(Path(__file__).with_name("engine_rank.py")), str(engines.path), *map(json.dumps, orders)])
    for _ in orders:
        engines.accept()
    return engines


def file_of(path: Path, kind: str) -> Path:
    """Return the file with a model's weights, or with their 8-bit values, computed by slow versions."""
    if kind:
        weights, quantisation = load_file(path / "model.safetensors"), QUANTISATIONS[kind]
        values = {n: slow_values(w, quantisation) if quantisation.applies(n) else w for n, w in weights.items()}
        save_file(values, path / f"{kind}.safetensors")
    return path / f"{kind or 'model'}.safetensors"


def measure(directory: Path, name: str) -> dict[str, Any]:
    platform, path, groups, found = start(), directory / name, {}, {}
    if dist.get_rank() == 0:
        models.make(name, path)
        if name in WITH_MTP:
            models.add_mtp_layer(path)
        save_tokenizer(path)
    dist.barrier()
    engines = engines_of(name, path) if dist.get_rank() == 0 else None
    for version, layout in enumerate(LAYOUTS[name]):
        trained, _, kind = layout.partition("/")
        made = (moe_groups_of if "moe" in name else groups_of)(trained, groups)
        model, _ = build(path, made, platform, Settings(mtp=MTPLearning() if name in WITH_MTP else None))
        is_live = layout == LAYOUTS[name][-1]
        options: dict[str, Any] = {"live_cpu_weights": is_live, "poison": True, "quantisation": kind or None}
        job = BridgeJob(model.spec.geometry, 30_000, verify=True, weights="loaders", **options)
        side = Side(model.local_parameters(), NoTarget())
        bridge = RemoteBridge(side, job, world_group(), engines, address=LOOPBACK, timeout_s=120)
        bridge.sync(version)
        if engines is not None:
            answers, synced = engines.answers, engines.ask_all(engines.names, "seen")
            engines.ask_all(engines.names, "load", path=str(file_of(path, kind)))
            loaded = engines.ask_all(engines.names, "seen")
            found[layout] = {"names": engines.names, "answers": answers, "synced": synced, "loaded": loaded}
        dist.barrier()
        if (
            is_live and name == "qwen3_tied"
        ):  # one of the two ranks of an engine is killed, so the whole engine is dropped
            if engines is not None:
                engines.ask("b.1", "trouble", during="sync", kind="kill", at=2)
            bridge.sync(50)
            if engines is not None:
                found["killed"] = {"names": engines.names, "seen": engines.ask_all(engines.names, "seen")}
        bridge.leave()
    if engines is not None:
        engines.close()
    return broadcast_json(found, 0)


def main(directory: Path) -> None:
    findings = {name: measure(directory, name) for name in LAYOUTS}
    finish(findings, directory)
