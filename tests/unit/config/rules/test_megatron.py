"""``actor.megatron``: any field of the installed Megatron's classes, checked before a process starts; none that other keys set."""

from __future__ import annotations

from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.rules.megatron import REFUSED, megatron_fields
from tests.unit.config.checking import check, only

OVERLAP = "actor.layout.tp=2 actor.layout.sequence_parallel=true actor.megatron.tp_comm_overlap=true"


def test_the_fields_read_from_source_are_those_of_the_imported_classes() -> None:
    found = megatron_fields()
    assert found is not None
    for kind in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig):
        named = {name for name, item in found.items() if kind.__name__ in item.classes}
        assert named == {item.name for item in fields(kind) if not item.name.startswith("_")}


def test_every_pattern_of_refused_fields_matches_one() -> None:
    """A table that names what a new Megatron has renamed would let the new name through."""
    names, patterns = megatron_fields() or {}, " ".join(REFUSED.values()).split()
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)] == []


def test_fields_of_all_three_classes_are_taken(workspace: Any) -> None:
    for settings in [
        "{overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 40000000}",
        "{apply_rope_fusion: true, gradient_accumulation_fusion: true}",
        "{moe_token_dispatcher_type: flex, moe_enable_deepep: true}",
        "{fp8: hybrid, fp8_recipe: blockwise, offload_modules: [core_attn]}",
        "{autocast_dtype: bf16, moe_z_loss_coeff: 1, attention_backend: flash}",
    ]:
        assert check(f"actor.megatron={settings}") == []


def test_communication_of_tensor_parallel_ranks_may_overlap_computation(workspace: Any) -> None:
    assert check(*OVERLAP.split(" "), "actor.megatron.tp_comm_bulk_wgrad=false") == []


def test_mistakes_are_named(workspace: Any) -> None:
    for setting, words in [
        (
            "actor.megatron.overlap_grad_reduc=true",
            ["overlap_grad_reduc=True", "no such field", "overlap_grad_reduce?"],
        ),
        ("actor.megatron.zzz=1", ["actor.megatron.zzz=1", "TransformerConfig"]),
        ("actor.megatron={overlap_grad_reduce: 3}", ["overlap_grad_reduce=3", "bool"]),
        ("actor.megatron={bucket_size: 1.5}", ["bucket_size=1.5", "int"]),
        ("actor.megatron={hidden_size: 8}", ["hidden_size=8", "config.json"]),
        ("actor.megatron={cuda_graph_impl: local}", ["cuda_graph_impl='local'", "shape", "remove it"]),
        ("actor.megatron={tp_comm_overlap: true}", ["tp_comm_overlap=True", "actor.layout.sequence_parallel=true"]),
        (f"{OVERLAP} trainer.packing=false", ["tp_comm_overlap=True", "trainer.packing=true", "padded"]),
        (f"{OVERLAP} model.layer_spec=local", ["tp_comm_overlap=True", "model.layer_spec=te"]),
        (f"{OVERLAP} trainer.world_size=4 actor.ranks=[0,2]", ["tp_comm_overlap=True", "all ranks", "remove it"]),
        (
            "actor.megatron={overlap_moe_expert_parallel_comm: true}",
            ["overlap_moe_expert_parallel_comm=True", "remove"],
        ),
        ("actor.megatron={delay_wgrad_compute: true}", ["delay_wgrad_compute=True", "remove it"]),
        (
            "actor.megatron={num_microbatches_with_partial_activation_checkpoints: 1}",
            ["num_microbatches_with_partial_activation_checkpoints=1", "recompute", "remove it"],
        ),
        ("actor.megatron={no_sync_func: f}", ["no_sync_func='f'", "Callable"]),
        ("actor.megatron={overlap_param_gather: true}", ["overlap_param_gather=True", "overlap_grad_reduce=true"]),
        (
            "actor.megatron={moe_expert_capacity_factor: 1.0}",
            ["moe_expert_capacity_factor=1.0", "dropped", "remove it"],
        ),
        (
            "actor.megatron={calculate_per_token_loss: false}",
            ["calculate_per_token_loss=False", "divided", "remove it"],
        ),
        (
            "actor.megatron={optimizer_cpu_offload: true}",
            ["optimizer_cpu_offload=True", "optimizer.offload", "remove it"],
        ),
        (
            "actor.megatron={use_precision_aware_optimizer: true}",
            ["use_precision_aware_optimizer=True", "optimizer.state_dtype", "remove it"],
        ),
        ("actor.megatron={clip_grad: 1.0}", ["clip_grad=1.0", "optimizer", "remove it"]),
        (
            "actor={layout: {cp: 2}, megatron: {cp_comm_type: a2a+p2p}}",
            ["cp_comm_type='a2a+p2p'", "hierarchical", "set it to p2p"],
        ),
        ("actor.recompute.modules=[attention]", ["actor.recompute.modules", "attention", "core_attn"]),
    ]:
        message = only(check(*setting.split(" ") if setting.startswith(OVERLAP) else [setting]))
        assert all(word in message for word in words), message


def test_names_on_the_command_line_join_those_of_the_file(workspace: Any) -> None:
    Path("own.yaml").write_text("model: {path: here}\nactor: {megatron: {bucket_size: 7, fp8: null}}\n")
    cfg = load_config("own.yaml", ["actor.megatron.bucket_size=9", "actor.megatron.nccl_ub=true"])
    assert cfg.actor.megatron == {"bucket_size": 9, "fp8": None, "nccl_ub": True}
