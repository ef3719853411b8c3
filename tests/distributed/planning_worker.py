"""Compare Megatron's allocations and the sizes of checkpoints on four ranks with the planner."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.config.schema import OptimizerConfig
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.weights import unwrap
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.planning.inputs import PlannedRole
from rlhf_mcore.planning.memory import checkpoint_bytes, state_bytes, weights_of_pass
from rlhf_mcore.readers.model_files import read_geometry
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.roles.role_files import RoleFiles
from tests.distributed import models
from tests.distributed.setting import MOE_LAYOUTS, Settings, build, finish, groups_of, moe_groups_of, start

# Model, layout and dtype: biases and an embedding shared by two stages, interleaving, experts with both kinds of split.
CASES = [
    ("qwen2", "tp2_cp2", "bf16"),
    ("qwen3_tied", "pp2_vpp2_dp2", "bf16"),
    ("llama", "dp4", "fp32"),
    ("qwen3_moe_mixed", "tp2_sp_ep2_etp1_dp2", "bf16"),
    ("qwen2_moe", "tp2_sp_pp2_ep2_etp1", "bf16"),
    ("deepseek_v3", "tp2_sp_pp2_ep2_etp1", "bf16"),
    ("gpt_oss", "tp2_sp_pp2_ep2_etp1", "bf16"),
]
# Megatron fields for each model and layout.
FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen2", "tp2_cp2"): {"grad_reduce_in_fp32": False},
}
# Shares of the optimizer state in host memory.
HOSTED = {
    ("llama", "dp4"): 0.5,
    ("qwen3_moe_mixed", "tp2_sp_ep2_etp1_dp2"): 0.75,
    ("qwen2_moe", "tp2_sp_pp2_ep2_etp1"): 1.0,
}
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
        fields = FIELDS.get((name, layout), {})
        hosted = HOSTED.get((name, layout), 0.0)
        settings = Settings(dtype=dtype, megatron=fields, optimizer=OptimizerConfig(offload=hosted))
        model, actor = build(directory / name, make(layout, groups), platform, settings)
        geometry = read_geometry(directory / name, "lm")
        role = PlannedRole("actor", geometry, model.groups.layout, True, dtype, megatron=fields, hosted=hosted)
        key = f"{name}/{layout}/{dtype}"
        findings[key] = compare_state(model, actor, role)
        findings[key] |= compare_checkpoint(model, actor, role, directory / name)
    finish(findings, directory)


def compare_state(model: MegatronModel, actor: Actor, role: PlannedRole) -> dict[str, Any]:
    """Return for each rank the bytes of live tensors and the prediction, and the same for the frozen model."""
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    assert model.optimizer is not None
    on_device = {tensor.data_ptr() for tensor in model.optimizer.device_state()}
    state = [(kind, tensor) for shard in model.optimizer.shards() for kind, tensor in shard.tensors.items()]
    held = {
        "weights": sum(buffer.param_data.nbytes for buffer in buffers),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "masters": sum(tensor.nbytes for kind, tensor in state if kind == "master" and tensor.data_ptr() in on_device),
        "moments": sum(tensor.nbytes for kind, tensor in state if kind != "master" and tensor.data_ptr() in on_device),
        "hosted": sum(tensor.nbytes for _, tensor in state if tensor.data_ptr() not in on_device),
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
