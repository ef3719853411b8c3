"""Rules for ``actor.megatron`` and the same key of other roles, which set fields of Megatron-core's configuration classes.

Names and types are read from the source of the installed Megatron-core, because importing its classes takes seconds. The ranks
build the classes, and report a combination of fields that Megatron rejects (``mcore/overrides.py``).
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rlhf_mcore.config.annotations import accepts
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.questions import RoleLayout, role_layouts
from rlhf_mcore.config.schema import Config
from rlhf_mcore.foreign import shorten

MODEL, DDP, OPTIMIZER = "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"
_SOURCES = {
    "model_parallel_config.py": {"ModelParallelConfig": MODEL},
    "transformer/transformer_config.py": {"TransformerConfig": MODEL},
    "distributed/distributed_data_parallel_config.py": {DDP: DDP},
    "optimizer/optimizer_config.py": {OPTIMIZER: OPTIMIZER},
}

# Fields that cannot be set, as patterns by reason. Megatron would accept them, but the computation would contradict the
# configuration, or the run would fail at its first checkpoint or sync.
REFUSED = {
    "config.json of the model sets it": "num_layers *hidden_size kv_channels num_attention_heads num_query_groups num_moe_experts "
    "add_bias_linear add_qkv_bias gated_linear_unit glu_* activation_func_clamp_value normalization layernorm_* qk_l* "
    "rotary_interleaved no_rope_freq window_* softmax_* attention_output_gate multi_latent_attention experimental_* "
    "fp32_residual_connection apply_residual_* is_hybrid_model heterogeneous_* moe_layer_freq moe_latent_size "
    "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_apply_probs_on_input moe_router_topk "
    "moe_router_topk_scaling_factor moe_router_*group* moe_router_pre_softmax moe_router_score_function "
    "moe_router_enable_expert_bias mtp_* mamba_* linear_* dsa_* mrope_*",
    "the keys of layout set it": "*_parallel_size *_parallel_sizes sequence_parallel hybrid_context_parallel "
    "pipeline_model_parallel_layout num_layers_in_* account_for_*",
    "dtype sets it": "fp16 bf16 params_dtype pipeline_dtype",
    "the keys of recompute set it": "recompute_* moe_layer_recompute num_microbatches_with_partial_activation_checkpoints",
    "the keys of optimizer set it": "optimizer lr min_lr weight_decay adam_* clip_grad sgd_momentum muon_*",
    "its value is fixed": "loss_scale min_loss_scale loss_scale_window hysteresis",
    "deterministic sets it": "deterministic_mode",
    "router_replay sets it": "moe_enable_routing_replay",
    "moe.aux_loss_coef sets it": "moe_aux_loss_coeff moe_router_load_balancing_type",
    "model.layer_spec sets it": "moe_grouped_gemm transformer_impl",
    "old and new logprobs are compared token by token, so nothing may be dropped": "hidden_dropout attention_dropout "
    "moe_token_dropping moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
    "the loss is already divided by the global token count": "calculate_per_token_loss average_in_collective "
    "gradient_reduce_div_fusion",
    "optimizer.offload sets it": "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d "
    "pin_cpu_grads pin_cpu_params use_torch_optimizer_for_cpu_offload",
    "optimizer.state_dtype sets it": "use_precision_aware_optimizer store_param_remainders main_params_dtype "
    "main_grads_dtype exp_avg_dtype exp_avg_sq_dtype",
    "checkpoints require the distributed optimizer": "use_distributed_optimizer num_distributed_optimizer_instances "
    "overlap_param_gather_with_optimizer_step",
    "the bridge and checkpoints read weights in dtype from the distributed optimizer": "fp8_param* fp4_param *_fsdp",
    "microbatches differ in shape": "variable_seq_lengths *cuda_graph*",
    "weights are loaded": "*_initialization init_model_with_meta_device",
    "the schedule of overlapping microbatches is not supported": "overlap_moe_expert_parallel_comm delay_wgrad_compute",
}


@dataclass(frozen=True, slots=True)
class MegatronField:
    """A field of Megatron's classes, with the annotation in its source."""

    classes: tuple[str, ...]
    annotation: str

    def accepts(self, value: Any) -> bool:
        return accepts(ast.parse(self.annotation, mode="eval").body, value)


@cache
def megatron_fields() -> Mapping[str, MegatronField] | None:
    """Return the fields of the installed Megatron-core by name, or None if it is not installed."""
    package = PathFinder.find_spec("megatron")
    places = (package.submodule_search_locations if package is not None else None) or []
    root = next((Path(place) / "core" for place in places if (Path(place) / "core").is_dir()), None)
    if root is None:
        return None
    fields: dict[str, MegatronField] = {}
    for file, kinds in _SOURCES.items():
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or node.name not in kinds:
                continue
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and not (name := ast.unparse(item.target)).startswith("_"):
                    others = fields[name].classes if name in fields else ()
                    fields[name] = MegatronField((*others, kinds[node.name]), ast.unparse(item.annotation))
    return fields


def reason_refused(name: str) -> str | None:
    """Return the reason why a user cannot set a field, or None."""
    for reason, patterns in REFUSED.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return reason
    return None


def megatron_problems(cfg: Config) -> Iterator[str]:
    """List Megatron fields that are unknown, have values of another type, or are set by other keys."""
    for role in role_layouts(cfg):
        values = value_of(cfg, f"{role.name}.megatron") or {}
        yield from _field_problems(f"{role.name}.megatron", values, is_trained=role.name in ("actor", "critic"))
        if values.get("tp_comm_overlap") is True:
            yield from _overlap_problems(cfg, role)
        if "a2a+p2p" in str(kind := values.get("cp_comm_type")):
            shown = f"{role.name}.megatron.cp_comm_type={shorten(repr(kind), 100)}"
            yield f"{shown} needs hierarchical process groups, which are not supported; set it to p2p, all_gather or a2a"


def _field_problems(key: str, settings: Mapping[str, Any], *, is_trained: bool) -> Iterator[str]:
    fields = megatron_fields()
    if fields is None:  # planning on a machine without Megatron
        return
    for name, value in settings.items():
        shown, field = f"{key}.{shorten(name, 100)}={shorten(repr(value), 100)}", fields.get(name)
        if field is None:
            close = difflib.get_close_matches(name[:100], fields, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"see {MODEL}, {DDP} and {OPTIMIZER}"
            yield f"{shown}: the installed Megatron-core has no such field; {hint}"
        elif (reason := reason_refused(name)) is not None:
            yield f"{shown}: cannot be set, because {reason}; remove it"
        elif not field.accepts(value):
            declared = re.sub(r"^Optional\[(.*)\]$", r"\1 or null", field.annotation)
            declared = declared.replace("torch.dtype", "fp32, bf16 or fp16")
            yield f"{shown} is not valid; Megatron-core declares it as {declared}"
        elif not is_trained and MODEL not in field.classes:
            yield f"{shown}: it is a field of {' and '.join(field.classes)}, but this model is not trained; remove it"
    if settings.get("overlap_param_gather") is True and settings.get("overlap_grad_reduce") is not True:
        yield f"{key}.overlap_param_gather=True needs {key}.overlap_grad_reduce=true; set it too"


def _overlap_problems(cfg: Config, role: RoleLayout) -> Iterator[str]:
    """List reasons why communication of tensor-parallel ranks cannot overlap with computation."""
    shown = f"{role.name}.megatron.tp_comm_overlap=True"
    if not role.layout.sequence_parallel:
        yield f"{shown} needs {role.name}.layout.sequence_parallel=true, and a tp of 2 or more; set them, or remove it"
    if not cfg.trainer.packing:
        yield f"{shown} needs trainer.packing=true: its buffers have one size, to which packed microbatches are padded"
    if role.ranks is not None and role.ranks != [0, cfg.trainer.world_size]:
        yield f"{shown} needs all ranks: Transformer Engine creates its process groups on every rank; remove it, or {role.name}.ranks"
    if cfg.model.layer_spec == "local":
        yield f"{shown} has no effect with model.layer_spec=local: it needs Transformer Engine; set model.layer_spec=te"
