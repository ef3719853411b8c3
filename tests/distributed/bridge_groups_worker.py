"""Sync and save over the world of four ranks, and concurrently over two groups of two ranks with different weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.state_files import STATE_INDEX, RankState, gather_index, state_file
from rlhf_mcore.bridge.files.state_reader import StateReader
from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run.endpoints import EngineDestinations, HostCopies
from rlhf_mcore.bridge.run.sync import ChangedOnly, NoTarget
from rlhf_mcore.bridge.run.transports import GroupLinks
from rlhf_mcore.families.quantised import QUANTISATIONS
from rlhf_mcore.geometry import LocalParameter, Shard, StateShard
from rlhf_mcore.parallel.collectives import StoreClaims, all_gather_json, world_group
from rlhf_mcore.protocols import SyncMismatch
from tests.distributed import eight_bit_engines
from tests.distributed.setting import finish, start
from tests.planned_bridge import planned_bridge
from tests.unit.bridge.eight_bits import slow_values
from tests.unit.bridge.engine import Engine
from tests.unit.bridge.geometry import BLOCKS, GEOMETRY, hf_tensors, mcore_tensors
from tests.unit.bridge.sources import Averages

TP = 2
KINDS = tuple(QUANTISATIONS.values())
PAIRS = ((0, 2), (1, 3))


def held_of(group: dist.ProcessGroup, hf: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return mcore_tensors(GEOMETRY, dict(hf), group.rank() % TP, TP)


def parameters_of(group: dist.ProcessGroup, held: Mapping[str, Tensor]) -> list[LocalParameter]:
    return [LocalParameter(name, tensor, Shard(group.rank() % TP, TP)) for name, tensor in held.items()]


def wrong(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ."""
    return sorted(
        name for name in expected | found if name not in found or not torch.equal(found[name], expected[name])
    )


def norms_of(hf: Mapping[str, Tensor]) -> list[str]:
    return [name for name in hf if name.endswith("norm.weight")]


def sync(group: dist.ProcessGroup, scale: float) -> dict[str, Any]:
    """Return the wrong tensors of each rank's engine after syncs of all tensors, of some and of averages, and the bytes of syncs."""
    hf = {name: tensor * scale for name, tensor in hf_tensors(GEOMETRY).items()}
    held, engine = held_of(group, hf), Engine({name: tensor.shape for name, tensor in hf.items()})
    parameters = parameters_of(group, held)
    common: dict[str, Any] = {"bucket_bytes": 256, "verify": True, "poison": True}
    bridge = planned_bridge(parameters, GEOMETRY, engine, group, changing=norms_of(hf), **common)
    stats = [bridge.sync(0)]
    found = [wrong(engine.tensors, hf)]
    for tensor in held.values():
        tensor += 1
    stats.append(bridge.sync(1))
    found.append(wrong(engine.tensors, {n: t + n.endswith("norm.weight") for n, t in hf.items()}))
    doubled = held_of(group, {name: tensor * 2 for name, tensor in hf.items()})
    averages = Averages({name: tensor - 1 for name, tensor in held.items()}, doubled)
    stats.append(planned_bridge(parameters, GEOMETRY, engine, group, sources=averages, **common).sync(2))
    found.append(wrong(engine.tensors, {name: tensor * 1.5 for name, tensor in hf.items()}))
    return {"wrong": found, "bytes": [[s.received_bytes, s.local_bytes, s.peak_bytes] for s in stats]}


def sync_apart(group: dist.ProcessGroup) -> dict[str, Any]:
    """Sync from the first two ranks, which hold only the model, to the others, which hold only an engine."""
    hf, is_trainer = hf_tensors(GEOMETRY), group.rank() < TP
    engine = Engine({name: tensor.shape for name, tensor in hf.items()})
    parameters = parameters_of(group, held_of(group, hf)) if is_trainer else []
    target = NoTarget() if is_trainer else engine
    options: dict[str, Any] = {"bucket_bytes": 256, "verify": True, "poison": True, "changing": norms_of(hf)}
    bridge = planned_bridge(parameters, GEOMETRY, target, group, **options)
    stats = bridge.sync(0)
    for parameter in parameters:
        parameter.tensor += 1
    bridge.sync(1)
    expected = {name: tensor + name.endswith("norm.weight") for name, tensor in hf.items()}
    return {
        "is_trainer": is_trainer,
        "wrong": [] if is_trainer else wrong(engine.tensors, expected),
        "bytes": [stats.received_bytes, stats.local_bytes],
    }


def compare_digests(group: dist.ProcessGroup) -> list[str]:
    """Return whether verified syncs of tensors and of averages pass, and the message after a bit of the last engine changes."""
    hf, is_trainer = hf_tensors(GEOMETRY), group.rank() < TP
    held = held_of(group, hf)
    parameters = parameters_of(group, held) if is_trainer else []
    target = NoTarget() if is_trainer else Engine({name: tensor.shape for name, tensor in hf.items()})
    options: dict[str, Any] = {"bucket_bytes": 256, "verify": True, "poison": True}
    averages = Averages(held, held) if is_trainer else None
    for sources in (averages, None):
        bridge = planned_bridge(parameters, GEOMETRY, target, group, sources=sources, **options)
        for version in range(3):
            bridge.sync(version)
    close, name = EngineDestinations.close, "model.layers.1.input_layernorm.weight"

    def tamper(landing: EngineDestinations, bucket: Bucket) -> None:
        if name in bucket.destination_buffers and group.rank() == group.size() - 1:
            landing.open(bucket)[name].view(torch.int64)[-1] ^= 1
        close(landing, bucket)

    with mock.patch.object(EngineDestinations, "close", tamper):
        try:
            bridge.sync(3)
        except SyncMismatch as error:
            return [str(error), *(() if is_trainer else [str(target.policy_version)])]
    return []


def save(group: dist.ProcessGroup, scale: float, directory: Path) -> list[str]:
    """Save weights and optimizer state as files of a group. Returns the differences after reading them."""
    hf = {name: tensor.float() * scale for name, tensor in hf_tensors(GEOMETRY).items()}
    held = held_of(group, hf)
    if group.rank() == 0:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
    dist.barrier(group)
    parameters = parameters_of(group, held)
    Exporter(parameters, GEOMETRY, [str(directory)], group, bucket_bytes=256, shard_bytes=500).write(
        directory / "saved"
    )
    dist.barrier(group)
    saved = {name: t for path in (directory / "saved").glob("*.safetensors") for name, t in load_file(path).items()}

    def shards(fill: bool) -> list[StateShard]:
        kinds = {name: t.view(-1) if fill else torch.full_like(t.view(-1), torch.nan) for name, t in held.items()}
        return [StateShard(p.name, p.shard, 0, p.tensor.numel(), {"exp_avg": kinds[p.name]}) for p in parameters]

    writers = shards(fill=True) if group.rank() < TP else []  # only the first data-parallel replica writes
    state = RankState(writers, GEOMETRY)
    if state.described:
        state.write(directory / state_file(group.rank()))
    index = gather_index(state.described, GEOMETRY, {"step": 1} if writers else None, group)
    if index is not None:
        (directory / STATE_INDEX).write_text(json.dumps(index))
    dist.barrier(group)
    StateReader(directory, GEOMETRY).read_into(found := shards(fill=False))
    return wrong(saved, hf) + wrong(
        {s.name: s.tensors["exp_avg"] for s in found}, {n: t.view(-1) for n, t in held.items()}
    )


def sync_quantised(group: dist.ProcessGroup, tp: int) -> dict[str, Any]:
    """Sync a bf16 model with ``tp`` ranks to 8-bit engines, before and after an update.

    Returns the wrong values of engines, and the bytes that a rank receives, first without quantisation.
    """
    found: dict[str, Any] = {"wrong": [], "bytes": []}
    hf = random_tensors(0)
    held = mcore_tensors(BLOCKS, hf, group.rank() % tp, tp)
    parameters = [LocalParameter(name, tensor, Shard(group.rank() % tp, tp)) for name, tensor in held.items()]
    shapes = {name: tensor.shape for name, tensor in hf.items()}
    for kind in (None, *KINDS):
        engine = Engine(shapes, torch.bfloat16)
        options: dict[str, Any] = {"bucket_bytes": 50_000, "verify": True, "poison": True}
        bridge = planned_bridge(
            parameters, BLOCKS, engine, group, quantisation=None if kind is None else kind.name, **options
        )
        for seed in (0, 1):
            hf = random_tensors(seed)
            for parameter in parameters:
                parameter.tensor.copy_(mcore_tensors(BLOCKS, hf, group.rank() % tp, tp)[parameter.name])
            stats = bridge.sync(seed)
            expected = {
                name: slow_values(tensor, kind).bfloat16() if kind and "_proj.weight" in name else tensor
                for name, tensor in hf.items()
            }
            found["wrong"].append(wrong(engine.tensors, expected))
        found["bytes"].append(stats.received_bytes)
    return found


def changes_of_8_bits(group: dist.ProcessGroup) -> dict[str, Any]:
    """Send only changes of a few elements to 8-bit engines. Returns the wrong values, the sent bytes and the bytes of all."""
    hf = {name: tensor.float() for name, tensor in random_tensors(0).items()}
    held = mcore_tensors(BLOCKS, hf, group.rank() % TP, TP)
    parameters = parameters_of(group, held)
    kept = HostCopies({parameter.name: parameter.tensor.view(-1) for parameter in parameters})
    engine = Engine({name: tensor.shape for name, tensor in hf.items()}, torch.float32)
    options: dict[str, Any] = {"bucket_bytes": 50_000, "verify": True, "changed_only": ChangedOnly(4, kept)}
    bridge = planned_bridge(parameters, BLOCKS, engine, group, quantisation="fp8", **options)
    bridge.sync(0)
    kept.take()
    for tensor in hf.values():
        tensor.view(-1)[::100] *= -1  # the scales of all blocks stay unchanged
    for parameter in parameters:
        parameter.tensor.copy_(mcore_tensors(BLOCKS, hf, group.rank() % TP, TP)[parameter.name])
    stats = bridge.sync(1)
    fp8 = QUANTISATIONS["fp8"]
    expected = {name: slow_values(t, fp8) if "_proj.weight" in name else t for name, t in hf.items()}
    return {"wrong": wrong(engine.tensors, expected), "sent": stats.sent_bytes, "whole": stats.whole_bytes}


def random_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(tensor.shape, generator=generator) / 8).bfloat16()
        for name, tensor in hf_tensors(BLOCKS).items()
    }


def claims(rank: int) -> list[list[int]]:
    """Return the numbers that this rank's engine gets in two rounds, and in one with a second counter. Only leads claim."""
    counter, other = StoreClaims(), StoreClaims()
    if rank % TP:
        return []
    rounds = []
    for count in (3, 2):
        counter.begin()
        rounds.append([counter.claim(count) for _ in range(4)])
    other.begin()
    return [*rounds, [other.claim(1)]]


def main(directory: Path) -> None:
    start()
    world, rank = world_group(), dist.get_rank()
    groups = [dist.new_group(list(pair)) for pair in PAIRS]
    mine = next(number for number, pair in enumerate(PAIRS) if rank in pair)
    findings = {"world": all_gather_json([sync(world, 1.0), save(world, 1.0, directory / "world")])}
    # Both groups run concurrently, so that a message, description or file of one group would be visible in the other.
    found = [sync(groups[mine], 3.0 + mine), save(groups[mine], 3.0 + mine, directory / f"pair{mine}")]
    findings["pairs"] = all_gather_json(found)
    with mock.patch.object(GroupLinks, "share", lambda *_: None):  # as if every rank were on a separate machine
        found = [sync(groups[mine], 5.0 + mine), save(groups[mine], 5.0 + mine, directory / f"messages{mine}")]
    findings["pairs, by messages"] = all_gather_json(found)
    findings["apart"] = all_gather_json(sync_apart(world))
    findings["digests"] = all_gather_json(compare_digests(world))
    findings["8 bits"] = {tp: all_gather_json(sync_quantised(world, tp)) for tp in (2, 4)}
    findings["changes of 8 bits"] = all_gather_json(changes_of_8_bits(world))
    findings["engines of 8 bits"] = all_gather_json(eight_bit_engines.measure_all(world))
    findings["claims"] = all_gather_json(claims(rank))
    findings["open files"] = all_gather_json(len(os.listdir("/proc/self/fd")))
    finish(findings, directory)
