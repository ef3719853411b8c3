"""Check ``actor.megatron`` and its like: they set fields of Megatron-core's own configuration classes, by name.

The fields are read from the source of the installed Megatron-core, without importing it: a wrong name or type is found before any
process starts. Fields that follow from another key are refused, and that key is named.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rlhf_mcore.config.annotations import accepts
from rlhf_mcore.config.implied import RoleLayout, needs_critic, role_layouts
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.foreign import shorten

MODEL, DDP, OPTIMIZER = "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"
_SOURCES = {
    "model_parallel_config.py": {"ModelParallelConfig": MODEL},
    "transformer/transformer_config.py": {"TransformerConfig": MODEL},
    "distributed/distributed_data_parallel_config.py": {DDP: DDP},
    "optimizer/optimizer_config.py": {OPTIMIZER: OPTIMIZER},
}

_OF_MODEL = "config.json of the model sets it"
_CONSTANT = "it cannot be changed"
_GRAPHS = (
    "Megatron's graphs replay one shape, one layout of sequences and, with pipelines, one number of microbatches, and fail at any "
    "other; here microbatches differ in all three"
)
_EP_SCHEDULE = "it belongs to Megatron's schedule of two overlapping microbatches, which is not supported"
_STATE = "checkpoints hold fp32 moments and masters on the device's own optimizer; this one's state is stored otherwise"
# Field: which key sets it, or why it cannot be set. What begins with a prefix of _OWNED_PREFIXES is in it too.
OWNED: dict[str, str] = {
    **dict.fromkeys(
        [
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "ffn_hidden_size",
            "kv_channels",
            "layernorm_epsilon",
            "layernorm_zero_centered_gamma",
            "add_bias_linear",
            "add_qkv_bias",
            "gated_linear_unit",
            "glu_linear_offset",
            "activation_func_clamp_value",
            "rotary_interleaved",
            "window_size",
            "window_attn_skip_freq",
            "normalization",
            "qk_layernorm",
            "qk_l2_norm",
            "softmax_scale",
            "softmax_type",
            "attention_output_gate",
            "multi_latent_attention",
            "no_rope_freq",
            "experimental_attention_variant",
            "num_moe_experts",
            "moe_layer_freq",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate",
            "moe_router_topk",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_pre_softmax",
            "moe_router_topk_scaling_factor",
            "moe_router_score_function",
            "moe_router_enable_expert_bias",
            "moe_latent_size",
            "is_hybrid_model",
            "heterogeneous_block_specs",
            "fp32_residual_connection",
            "apply_residual_connection_post_layernorm",
            "moe_apply_probs_on_input",
        ],
        _OF_MODEL,
    ),
    "tensor_model_parallel_size": "layout.tp sets it",
    "pipeline_model_parallel_size": "layout.pp sets it",
    "virtual_pipeline_model_parallel_size": "layout.vpp sets it",
    "pipeline_model_parallel_layout": "layout.layers_per_stage sets it",
    "num_microbatches_with_partial_activation_checkpoints": "recompute applies to all microbatches",
    "num_layers_in_first_pipeline_stage": "layout.layers_per_stage sets it",
    "num_layers_in_last_pipeline_stage": "layout.layers_per_stage sets it",
    "account_for_embedding_in_pipeline_split": "layout.layers_per_stage sets it",
    "account_for_loss_in_pipeline_split": "layout.layers_per_stage sets it",
    "context_parallel_size": "layout.cp sets it",
    "hierarchical_context_parallel_sizes": "layout.cp sets it",
    "hybrid_context_parallel": "layout.cp sets it",
    "sequence_parallel": "layout.sequence_parallel sets it",
    "expert_model_parallel_size": "layout.ep sets it",
    "expert_tensor_parallel_size": "layout.etp sets it",
    "fp16": "dtype sets it",
    "bf16": "dtype sets it",
    "params_dtype": "dtype sets it",
    "pipeline_dtype": "dtype sets it",
    "recompute_granularity": "recompute.granularity sets it",
    "recompute_method": "recompute.method sets it",
    "recompute_num_layers": "recompute.num_layers sets it",
    "recompute_modules": "recompute.modules sets it",
    "moe_enable_routing_replay": "router_replay sets it",
    "moe_layer_recompute": "recompute.modules=[moe] sets it",
    "deterministic_mode": "deterministic sets it",
    "moe_aux_loss_coeff": "moe.aux_loss_coef sets it",
    "moe_router_load_balancing_type": "moe.aux_loss_coef sets it",
    "moe_grouped_gemm": "model.layer_spec sets it",
    "transformer_impl": "model.layer_spec sets it",
    "lr": "optimizer.lr sets it",
    "min_lr": "optimizer.schedule.min_lr sets it",
    "weight_decay": "optimizer.weight_decay sets it",
    "adam_beta1": "optimizer.beta1 sets it",
    "adam_beta2": "optimizer.beta2 sets it",
    "adam_eps": "optimizer.eps sets it",
    "clip_grad": "optimizer.clip_grad sets it",
    "optimizer": "optimizer.name sets it",
    "sgd_momentum": "optimizer.momentum sets it",
    "loss_scale": "optimizer.loss_scale sets it",
    "initial_loss_scale": "optimizer.loss_scale.initial sets it",
    "min_loss_scale": _CONSTANT,
    "loss_scale_window": _CONSTANT,
    "hysteresis": _CONSTANT,
    "use_precision_aware_optimizer": _STATE,
    "optimizer_cpu_offload": _STATE,
    "main_params_dtype": _STATE,
    "exp_avg_dtype": _STATE,
    "exp_avg_sq_dtype": _STATE,
    "hidden_dropout": "old and new logprobs are compared token by token, so nothing is dropped",
    "attention_dropout": "old and new logprobs are compared token by token, so nothing is dropped",
    "cross_entropy_loss_fusion": "logprobs and entropies have a fused kernel of their own (parallel/logprobs.py)",
    "cross_entropy_fusion_impl": "logprobs and entropies have a fused kernel of their own (parallel/logprobs.py)",
    "calculate_per_token_loss": "losses arrive divided by the global token count, which " + _CONSTANT,
    "average_in_collective": "losses arrive divided by the global token count, which " + _CONSTANT,
    "gradient_reduce_div_fusion": "losses arrive divided by the global token count, which " + _CONSTANT,
    "use_distributed_optimizer": "the optimizer is always sharded over data-parallel ranks",
    "num_distributed_optimizer_instances": "the optimizer is sharded over all data-parallel ranks",
    "overlap_param_gather_with_optimizer_step": "overlap_param_gather is what there is",
    "variable_seq_lengths": "microbatches differ in length; " + _CONSTANT,
    "perform_initialization": "weights are loaded; " + _CONSTANT,
    "use_cpu_initialization": "weights are loaded; " + _CONSTANT,
    "init_model_with_meta_device": "weights are loaded; " + _CONSTANT,
    "fp8_param": "weights are stored in dtype, where the bridge and checkpoints read them",
    "fp4_param": "weights are stored in dtype, where the bridge and checkpoints read them",
    "fp8_param_gather": "weights are stored in dtype, where the bridge and checkpoints read them",
    "overlap_moe_expert_parallel_comm": _EP_SCHEDULE,
    "delay_wgrad_compute": _EP_SCHEDULE,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    **dict.fromkeys(
        ("masked_softmax_fusion", "attention_softmax_in_fp32", "apply_query_key_layer_scaling"),
        "attention has no softmax of its own: torch's or Transformer Engine's kernel does all of it",
    ),
    "moe_token_dropping": "old and new logprobs are compared token by token, so nothing is dropped",
    "moe_expert_capacity_factor": "old and new logprobs are compared token by token, so nothing is dropped",
    "moe_pad_expert_input_to_capacity": "old and new logprobs are compared token by token, so nothing is dropped",
}
_OWNED_PREFIXES = {
    "mtp_": _OF_MODEL,
    "muon_": "Muon is our own, by optimizer.name=muon and optimizer.momentum; Megatron's refuses the distributed optimizer",
    "mamba_": _OF_MODEL,
    "linear_": _OF_MODEL,
    "dsa_": _OF_MODEL,
    "mrope_": _OF_MODEL,
    "embedding_init": "weights are loaded; " + _CONSTANT,
    "init_method": "weights are loaded; " + _CONSTANT,
    "cuda_graph": _GRAPHS,
    "inference_": "engines generate, not this model",
    "flash_decode": "engines generate, not this model",
    "use_inference_optimized_layers": "engines generate, not this model",
    "use_megatron_fsdp": "Megatron's FSDP stores weights where neither the bridge nor checkpoints read them",
    "use_custom_fsdp": "Megatron's FSDP stores weights where neither the bridge nor checkpoints read them",
    "fsdp_": "Megatron's FSDP stores weights where neither the bridge nor checkpoints read them",
    "data_parallel_sharding_strategy": "Megatron's FSDP stores weights where neither the bridge nor checkpoints read them",
    "outer_dp_sharding_strategy": "Megatron's FSDP stores weights where neither the bridge nor checkpoints read them",
}


RECOMPUTED = ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj")


@dataclass(frozen=True, slots=True)
class MegatronField:
    """A field of one or several of Megatron's classes, with its annotation as it is written there."""

    name: str
    classes: tuple[str, ...]
    annotation: str

    def accepts(self, value: Any) -> bool:
        return accepts(ast.parse(self.annotation, mode="eval").body, value)

    @property
    def is_settable(self) -> bool:
        """Return whether a plain value can be right: not for functions and objects."""
        return not any(kind in self.annotation for kind in ("Callable", "ContextManager", "RecipeConfig"))


@cache
def megatron_fields() -> Mapping[str, MegatronField] | None:
    """Read the fields of the installed Megatron-core by name. Returns None where there is none."""
    package = PathFinder.find_spec("megatron")
    places = (package.submodule_search_locations if package is not None else None) or []
    root = next((Path(place) / "core" for place in places if (Path(place) / "core").is_dir()), None)
    if root is None:
        return None
    fields: dict[str, MegatronField] = {}
    for file, classes in _SOURCES.items():
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                for name, annotation in _annotations(node):
                    before = fields[name].classes if name in fields else ()
                    fields[name] = MegatronField(name, (*before, classes[node.name]), annotation)
    return fields


def _annotations(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_"):
            yield item.target.id, ast.unparse(item.annotation)


def reason_owned(name: str) -> str | None:
    """Explain why a user cannot set a field, or return None."""
    return OWNED.get(name) or next((why for start, why in _OWNED_PREFIXES.items() if name.startswith(start)), None)


def megatron_problems(cfg: Config) -> Iterator[str]:
    """List fields of Megatron that are unknown, of another type, or set by other keys."""
    trained: list[tuple[str, dict[str, Any] | None]] = [("actor", cfg.actor.megatron)]
    frozen: list[tuple[str, dict[str, Any] | None]] = []
    if run_kind(cfg).generates:
        trained += [("critic", cfg.critic.megatron)] if needs_critic(cfg) else []
        frozen += [("reward.model", cfg.reward.model.megatron)] if cfg.reward.model.path is not None else []
        frozen += [("teacher", cfg.teacher.megatron)] if cfg.teacher.path is not None else []
    for role, recompute in (("actor", cfg.actor.recompute), ("critic", cfg.critic.recompute)):
        if unknown := sorted(set(recompute.modules) - set(RECOMPUTED)):
            yield f"{role}.recompute.modules: {shorten(unknown)} is no part of a layer; choose from: {', '.join(RECOMPUTED)}"
    for role, settings in trained + frozen:
        if settings:
            yield from _setting_problems(f"{role}.megatron", settings, is_trained=(role, settings) in trained)
    for layout in role_layouts(cfg):
        layout_settings = dict(trained + frozen).get(layout.name) or {}
        if layout_settings.get("tp_comm_overlap") is True:
            yield from _overlap_problems(cfg, layout)
        if (kind := layout_settings.get("cp_comm_type")) is None:
            continue
        shown = f"{layout.name}.megatron.cp_comm_type={shorten(repr(kind), 100)}"
        if layout.layout.cp == 1:
            yield f"{shown} has no effect with {layout.name}.layout.cp=1; remove it"
        elif "a2a+p2p" in str(kind):
            yield f"{shown} needs process groups of two levels, which are not made; set it to p2p, all_gather or a2a"


def _overlap_problems(cfg: Config, role: RoleLayout) -> Iterator[str]:
    """Explain why the communication of tensor-parallel ranks cannot overlap their computation."""
    shown = f"{role.name}.megatron.tp_comm_overlap=True"
    if not role.layout.sequence_parallel:
        yield f"{shown} needs {role.name}.layout.sequence_parallel=true, and a tp of 2 or more; set them, or remove it"
    if not cfg.trainer.packing:
        yield f"{shown} needs trainer.packing=true: its buffers are of one size, to which packed microbatches are filled up"
    if role.ranks is not None and role.ranks != [0, cfg.trainer.world_size]:
        yield f"{shown} needs all ranks: Transformer Engine makes its process groups with every rank; remove it, or {role.name}.ranks"
    if cfg.model.layer_spec == "local":
        yield f"{shown} has no effect with model.layer_spec=local: Transformer Engine does it; set model.layer_spec=te"


def _setting_problems(key: str, settings: Mapping[str, Any], *, is_trained: bool) -> Iterator[str]:
    fields = megatron_fields()
    if fields is None:  # a plan is made where Megatron is not
        return
    for name, value in settings.items():
        shown = f"{key}.{shorten(name, 100)}={shorten(repr(value), 100)}"
        field = fields.get(name)
        if field is None:
            close = difflib.get_close_matches(name[:100], fields, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"see its {MODEL}, {DDP} and {OPTIMIZER}"
            yield f"{shown}: the installed Megatron-core has no such field; {hint}"
        elif (why := reason_owned(name)) is not None:
            yield f"{shown}: not a field to set here, because {why}; remove it"
        elif not field.is_settable:
            yield f"{shown}: it takes an object of Python ({field.annotation}), not a value; remove it"
        elif not field.accepts(value):
            declared = field.annotation.replace("torch.dtype", "fp32, bf16 or fp16").replace("Optional", "null or ")
            yield f"{shown} is not valid; Megatron-core declares it as {declared}"
        elif not is_trained and MODEL not in field.classes:
            yield f"{shown}: a field of {' and '.join(field.classes)}, and this model is not trained; remove it"

    if settings.get("overlap_param_gather") is True and settings.get("overlap_grad_reduce") is not True:
        yield f"{key}.overlap_param_gather=True needs {key}.overlap_grad_reduce=true; set it too"
