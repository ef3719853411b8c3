"""Compare converted checkpoints with checkpoints that Megatron-core writes and reads at TP2·PP2, during training."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from safetensors.torch import load_file, save_file

from rlhf_mcore.commands.convert.command import main as convert
from rlhf_mcore.mcore.groups import ModelGroups, use_groups
from rlhf_mcore.mcore.model import MegatronModel, unwrap
from rlhf_mcore.parallel.collectives import all_gather_json
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import (
    LAYOUTS,
    Settings,
    batch_for,
    build,
    finish,
    gatherer,
    groups_of,
    load_hf,
    moe_groups_of,
    rows,
    start,
)
from tests.distributed.update_worker import fill

CASES = {
    "qwen2": "pp2_vpp2_dp2",
    "qwen3_tied": "tp2_pp2",  # one key-value head
    "qwen3_moe_mixed": "tp2_sp_pp2",
    "qwen2_moe": "tp2_sp_ep2_etp1_dp2",
    "mixtral": "tp2_sp_pp2_ep2_etp1",
}
# In the layer spec without Transformer Engine, norms are separate modules. In the files, they belong to linear layers.
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def main(directory: Path) -> None:
    platform = start()
    dense: dict[str, ModelGroups] = {}
    experts: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {}
    for name, layout in CASES.items():
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
            assert convert(["--from", "hf", "--to", "megatron", str(path), str(directory / f"{name}_converted")]) == 0
        dist.barrier()
        groups = groups_of(layout, dense) if layout in LAYOUTS else moe_groups_of(layout, experts)
        model, actor = build(path, groups, platform, Settings())
        loaded = load(model, directory / f"{name}_converted" / "release", path)
        batch = batch_for(rows())
        fill(batch, load_hf(path))
        actor.deliver_update(batch)()
        save(model, model.optimizer.megatron, directory / f"{name}_trained")
        unmoved = write_gathered(model, directory / f"{name}_expected.safetensors", path)
        findings[name] = {"loaded": loaded, "unmoved": unmoved}
    finish(findings, directory)


def describe_shards(model: MegatronModel) -> dict[str, Any]:
    """Return Megatron's description of this rank's shards."""
    metadata = {"dp_cp_group": model.groups.collection.dp_cp}
    with use_groups(model.groups, model.platform):
        chunks = [unwrap(chunk).sharded_state_dict(metadata=metadata) for chunk in model.chunks]
    return {f"model{k}": chunk for k, chunk in enumerate(chunks)}


def save(model: MegatronModel, optimizer: Any, directory: Path) -> None:
    """Save weights, optimizer state and arguments, like Megatron-LM during training."""
    directory.mkdir(exist_ok=True)
    dist.barrier()
    state = describe_shards(model)
    with use_groups(model.groups, model.platform):
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": model.groups.collection.dp_cp}
        whole = {key: value for chunk in state.values() for key, value in chunk.items()} if len(state) == 1 else state
        state["optimizer"] = optimizer.sharded_state_dict(whole, metadata=metadata)
        here = {"synchronize": mock.Mock(), "current_device": lambda: torch.device("cpu")}
        with mock.patch.multiple(
            "torch.cuda", **here
        ):  # Megatron's writer uses the device without checking that there is one
            dist_checkpointing.save({**state, "args": Namespace(num_layers=4), "iteration": 1}, str(directory))


def load(model: MegatronModel, directory: Path, source: Path) -> str:
    """Let Megatron-core load a converted checkpoint into the model. Returns the first weight that differs from the source, or ""."""
    for parameter in model.local_parameters():
        parameter.tensor.fill_(float("nan"))
    config = unwrap(model.chunks[0]).config
    frequency, fused = config.moe_layer_freq, dict(FUSED_NORMS)
    if isinstance(frequency, list) and all(frequency):
        config.moe_layer_freq = 1  # Megatron-LM's value if every layer is an MoE layer, so that layers are stacked
    state = describe_shards(model)
    config.moe_layer_freq = frequency
    for layer in ["", *(f"{k}." for k in range(config.num_layers))]:
        is_moe = bool(config.num_moe_experts) and (not layer or bool(frequency[int(layer[:-1])]))
        names = {old: new for old, new in fused.items() if not (is_moe and old.startswith("pre_mlp"))}
        prefix = f"decoder.layers.{layer}"
        apply_prefix_mapping(state, {prefix + old: prefix + new for old, new in names.items()})
    with use_groups(model.groups, model.platform):
        found = dist_checkpointing.load(state, str(directory))
        for k, chunk in enumerate(model.chunks):
            unwrap(chunk).load_state_dict(found[f"model{k}"])
    return any_rank(all_gather_json(first_difference(gatherer(model), load_file(source / "model.safetensors"))))


def write_gathered(model: MegatronModel, path: Path, source: Path) -> list[str]:
    """Write the current weights. Returns the names of the tensors that training has not changed."""
    tensors = {name: tensor.clone() for name, tensor in gatherer(model)}
    if dist.get_rank() == 0:
        save_file(tensors, path)
    before = load_file(source / "model.safetensors")
    return [name for name, tensor in tensors.items() if torch.equal(tensor, before[name])]
