"""What Megatron allocates, what a checkpoint holds and what a sync moves on four ranks, beside what the planner says."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from safetensors import safe_open

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.run.sync import PlannedBridge
from rlhf_mcore.config.model_files import read_geometry
from rlhf_mcore.config.schema import Config
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.weights import unwrap
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.planning.inputs import PlannedRole
from rlhf_mcore.planning.sync import sync_plan
from rlhf_mcore.planning.weights import checkpoint_bytes, state_bytes, weights_of_pass
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.roles.role_files import RoleFiles
from tests.distributed import models
from tests.distributed.setting import MOE_LAYOUTS, Settings, build, finish, groups_of, load_hf, moe_groups_of, start

# Model, layout and dtype: biases and an embedding that two stages share, interleaving, experts cut both ways.
CASES = [
    ("qwen2", "tp2_pp2", "bf16"),
    ("qwen2", "tp2_cp2", "bf16"),
    ("qwen3_tied", "pp4", "fp32"),
    ("qwen3_tied", "pp2_vpp2_dp2", "bf16"),
    ("llama", "dp4", "fp32"),
    ("qwen3_moe_mixed", "tp2_sp_ep2_etp1_dp2", "bf16"),
    ("qwen3_moe", "pp2_vpp2_ep2_dp2", "fp32"),
    ("qwen2_moe", "tp2_sp_pp2_ep2_etp1", "bf16"),
    ("mixtral", "tp2_sp_pp2", "bf16"),
    ("deepseek_v3", "tp2_sp_pp2_ep2_etp1", "bf16"),
    ("gpt_oss", "tp2_sp_pp2_ep2_etp1", "bf16"),
]
BUCKET_BYTES = 20_000


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {}
    for name in sorted({case[0] for case in CASES}):
        if dist.get_rank() == 0:
            models.make(name, directory / name)
    dist.barrier()
    for name, layout, dtype in CASES:
        make = moe_groups_of if layout in MOE_LAYOUTS else groups_of
        model, actor = build(directory / name, make(layout, groups), platform, Settings(dtype=dtype))
        role = PlannedRole("actor", read_geometry(directory / name, "lm"), model.groups.layout, True, dtype)
        key = f"{name}/{layout}/{dtype}"
        findings[key] = compare_state(model, actor, role)
        findings[key] |= compare_checkpoint(model, actor, role, directory / name)
        if (
            not role.geometry.num_experts
        ):  # transformers holds experts as one tensor, so the engine hf does not take them
            findings[key] |= compare_sync(model, role, directory / name)
    finish(findings, directory)


def compare_state(model: MegatronModel, actor: Actor, role: PlannedRole) -> dict[str, Any]:
    """By rank, what is held by live tensors and what was predicted; and for the model as a frozen one."""
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    shards = model.optimizer.shards()
    held = {
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "masters": sum(shard.tensors["master"].nbytes for shard in shards if "master" in shard.tensors),
        "moments": sum(shard.tensors[kind].nbytes for shard in shards for kind in ("exp_avg", "exp_avg_sq")),
    }
    frozen = replace(role, trained=False)
    predicted = asdict(state_bytes(role, dist.get_rank()))
    frozen_held = sum(parameter.tensor.nbytes for parameter in model.local_parameters())
    frozen_predicted = state_bytes(frozen, dist.get_rank()).total
    layers = [[sum(p.nbytes for p in layer.parameters()) for layer in unwrap(c).decoder.layers] for c in model.chunks]
    two = max(sum(sizes[number : number + 2]) for sizes in layers for number in range(len(sizes)))
    by_layer_held = frozen_held - sum(map(sum, layers)) + two
    by_layer_predicted = weights_of_pass(replace(frozen, by_layer=True), dist.get_rank())
    return {
        "geometry": [asdict(model.spec.geometry), asdict(role.geometry)],
        "state": [all_gather_json(held), all_gather_json(predicted)],
        "frozen": [all_gather_json(frozen_held), all_gather_json(frozen_predicted)],
        "by_layer": [all_gather_json(by_layer_held), all_gather_json(by_layer_predicted)],
    }


def compare_checkpoint(model: MegatronModel, actor: Actor, role: PlannedRole, source: Path) -> dict[str, Any]:
    path = source.with_name(f"{source.name}-{role.dtype}-checkpoint")
    exporter = Exporter(
        model.local_parameters(), role.geometry, [str(source)], world_group(), bucket_bytes=BUCKET_BYTES
    )
    RoleFiles("actor", actor.model, exporter).write(path)
    dist.barrier()
    return {"checkpoint": [sum(map(tensor_bytes, path.rglob("*.safetensors"))), checkpoint_bytes(role)]}


def tensor_bytes(file: Path) -> int:
    with safe_open(file, framework="pt") as content:
        return sum(content.get_tensor(name).nbytes for name in content.keys())  # noqa: SIM118 - not a mapping


def compare_sync(model: MegatronModel, role: PlannedRole, path: Path) -> dict[str, Any]:
    """The plan of a bridge between this model and a transformers model on every rank, as the engine ``hf`` is one."""
    engine: Any = SimpleNamespace(model=load_hf(path))
    bridge = PlannedBridge(model.local_parameters(), role.geometry, engine, world_group(), bucket_bytes=BUCKET_BYTES)
    cfg = Config()
    cfg.rollout.engine, cfg.bridge.bucket_bytes = "hf", BUCKET_BYTES
    planned = sync_plan(cfg, role, dist.get_world_size(), ranks_per_node=8)
    counted = planned.bytes()
    mine = bridge.rank_plan
    return {
        "received": [all_gather_json(mine.received_bytes), counted.received.tolist()],
        "sent": [sum(all_gather_json(mine.sent_bytes)), int(counted.sent.sum())],
        "local": [all_gather_json(mine.local_bytes), counted.local.tolist()],
        "buffers": [max(all_gather_json(mine.peak_bytes(2))), counted.peak(2)],
    }
