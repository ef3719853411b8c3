"""Check ``rollout.vllm``, which sets arguments of vLLM's engine by name, and report the backends that vLLM chose.

The arguments are read from the source of the installed vLLM, without importing it. A wrong name or type is therefore found
before any process starts. Arguments that follow from another key are rejected, and the message names that key.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.annotations import Definition, accepts
from rlhf_mcore.families.quantised import QUANTISATIONS
from rlhf_mcore.foreign import shorten

if TYPE_CHECKING:
    from torch import nn

    from rlhf_mcore.config.schema import RolloutConfig


KEY = "rollout.vllm"

_BY_KEY = {
    "model.path": "model model_weights model_impl model_class_overrides tokenizer tokenizer_mode tokenizer_revision "
    "skip_tokenizer_init trust_remote_code hf_config_path hf_overrides config_format revision code_revision",
    "model.dtype": "dtype",
    "seed": "seed",
    "data.max_images": "limit_mm_per_prompt mm_processor_cache_gb mm_device_do_normalize",
    "actor.lora": "enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules default_mm_loras",
    "actor.router_replay": "enable_return_routed_experts aux_output_config",
    "rollout.sampling": "return_sampling_mask generation_config override_generation_config watermark_config",
    "rollout.layout.tp": "tensor_parallel_size",
    "rollout.layout.pp": "pipeline_parallel_size",
    "rollout.layout.dp": "data_parallel_size",
    "rollout.layout.ep": "enable_expert_parallel",
    "rollout.max_model_len": "max_model_len",
    "rollout.max_num_seqs": "max_num_seqs",
    "rollout.max_num_batched_tokens": "max_num_batched_tokens",
    "rollout.gpu_memory_utilization": "gpu_memory_utilization",
    "rollout.kv_cache_gib": "kv_cache_memory_bytes num_gpu_blocks_override",
    "rollout.enforce_eager": "enforce_eager",
    "rollout.sleep_level": "enable_sleep_mode",
    "rollout.quantization": "quantization quantization_config allow_deprecated_quantization",
    "rollout.speculative": "speculative_config spec_method spec_model spec_tokens",
}
_BY_REASON = {
    "the engine's processes are ranks of the run": "distributed_executor_backend master_addr master_port nnodes node_rank device_ids "
    "prefill_context_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
    "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
    "data_parallel_backend enable_elastic_ep elastic_ep_max_dp_size enable_fault_tolerance fault_tolerance_config",
    "the trainer sends the weights": "load_format model_loader_extra_config weight_transfer_config",
    "the bridge writes each weight into its place in the engine": "cpu_offload_gb cpu_offload_params offload_backend "
    "offload_group_size offload_num_in_group offload_prefetch_step offload_params enable_eplb eplb_config expert_placement_strategy "
    "dcp_q_replicate",
    "logprobs must belong to the distribution that rollout.sampling samples from": "logprobs_mode logits_processors",
    "the engine must forget keys and values when its weights change": "kv_transfer_config kv_offloading_size kv_offloading_backend "
    "ec_transfer_config",
    "the engine depends on vLLM's own class": "scheduler_cls worker_cls worker_extension_cls",
    "the engine generates text": "runner convert pooler_config diffusion_config",
    "RLHF_MCORE_DEBUG=1 shows vLLM's log": "disable_log_stats logging_config log_level log_config_file",
}
# Argument of vLLM -> the reason why it cannot be set.
OWNED = {name: f"{key} sets it" for key, names in _BY_KEY.items() for name in names.split()}
OWNED |= {name: reason for reason, names in _BY_REASON.items() for name in names.split()}


def vllm_arguments() -> Mapping[str, ast.expr] | None:
    """Return the fields of the installed vLLM's EngineArgs with their annotations, or None if vLLM is not installed."""
    source = _source()
    if source is None:
        return None
    [kind] = [node for node in _tree(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"]
    fields = [item for item in kind.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    names = {ast.unparse(item.target): item.annotation for item in fields}
    return {name: annotation for name, annotation in names.items() if not name.startswith("_")}


def argument_problems(cfg: RolloutConfig) -> Iterator[str]:
    """Yield problems with vLLM arguments that are unknown, have a wrong type, or are set by other keys."""
    fields = vllm_arguments() if cfg.vllm else None
    if fields is None:  # a plan may be made on a machine without vLLM
        return
    source = _source()
    assert source is not None
    find = partial(_definition, source)
    for name, value in (cfg.vllm or {}).items():
        shown = f"{KEY}.{shorten(name, 100)}={shorten(repr(value), 100)}"
        if (annotation := fields.get(name)) is None:
            close = difflib.get_close_matches(name[:100], fields, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else "see its EngineArgs"
            yield f"{shown}: the installed vLLM has no such engine argument; {hint}"
        elif name in OWNED:
            yield f"{shown}: not an argument to set here, because {OWNED[name]}; remove it"
        elif not accepts(annotation, value, find):
            alias = find(ast.unparse(annotation))
            declared = alias if isinstance(alias, ast.expr) else annotation
            yield f"{shown} is not valid; vLLM declares it as {shorten(' '.join(ast.unparse(declared).split()), 500)}"


def _source() -> Path | None:
    package = PathFinder.find_spec("vllm")
    places = (package.submodule_search_locations if package is not None else None) or []
    return next((file for place in places if (file := Path(place) / "engine" / "arg_utils.py").is_file()), None)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _definition(file: Path, name: str) -> Definition | None:
    """Find the alias or class with a name in a vLLM file, or in the file that it is imported from."""
    for node in ast.walk(_tree(file)):
        match node:
            case ast.ClassDef(name=found) if found == name:
                return node
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return value
            case ast.ImportFrom(module=str(module), names=imported) if any(each.name == name for each in imported):
                root = next(parent for parent in file.parents if parent.name == "vllm").parent
                place = root.joinpath(*module.split("."))
                sources = [place.with_suffix(".py"), place / "__init__.py"]
                return next((_definition(source, name) for source in sources if source.is_file()), None)
    return None


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def config_of(name: str, tensors: Iterable[str]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a config.json: DeepSeek-V3's format for fp8, or compressed-tensors for int8.

    ``tensors`` contains the tensor names of the model. Activations are quantised when a layer receives them: per token, and
    for fp8 in blocks of 128 values.
    """
    kind = QUANTISATIONS[name]
    others = [
        tensor.removesuffix(".weight") for tensor in tensors if tensor.endswith(".weight") and not kind.applies(tensor)
    ]
    if name == "fp8":
        block = list(kind.block)
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": block,
            "modules_to_not_convert": others,
        }
    scheme = {
        "targets": ["Linear"],
        "weights": {**_INT8, "strategy": "channel", "dynamic": False},
        "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": others,
    }


def quantised_options(name: str, tensors: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of vllm.LLM for GPUs. CPU engines need none, because they get dequantised weights."""
    config = config_of(name, tensors)

    def override(hf_config: Any) -> Any:
        hf_config.quantization_config = config
        return hf_config

    return {"hf_overrides": override}


# Attributes of vLLM's CUDA communicator, in the order in which it tries them before NCCL.
_ALL_REDUCES = {
    "fi_ar_comm": "FlashInfer",
    "qr_comm": "quick",
    "ca_comm": "custom",
    "symm_mem_comm": "symmetric memory",
}


def live_backends(model: nn.Module, vllm_config: Any) -> dict[str, str]:
    """Return the backends of an engine by part, as found in its layers and communicators."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    methods = [module.quant_method for module in model.modules() if hasattr(module, "quant_method")]
    found = {
        "engine attention": {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")},
        "engine experts": {name for method in methods for name in _expert_backends(method)},
        "engine products": {type(method.fp8_linear).__name__ for method in methods if hasattr(method, "fp8_linear")},
    }
    kernels = {part: " + ".join(sorted(names)) for part, names in found.items() if names}
    return kernels | _communication(vllm_config.parallel_config)


def _expert_backends(method: Any) -> set[str]:
    values = vars(method).values()
    return {
        str(value.value)
        for value in values
        if isinstance(value, Enum) and type(value).__name__.lower().endswith("moebackend")
    }


def _communication(parallel: Any) -> dict[str, str]:
    import torch
    from vllm.distributed.parallel_state import get_ep_group, get_tp_group

    kernels = {}
    if parallel.tensor_parallel_size > 1:
        by = (group := get_tp_group()).device_communicator
        tried = {name: getattr(by, attribute, None) for attribute, name in _ALL_REDUCES.items()}
        names = [name for name, each in tried.items() if each is not None and not each.disabled]
        if not isinstance(getattr(by, "dist_module", torch.distributed), ModuleType):  # vLLM's own module, on a CPU
            names = ["shared memory"]
        kernels["engine all-reduce"] = " or ".join([*names, torch.distributed.get_backend(group.device_group)])
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        kernels["engine all-to-all"] = type(get_ep_group().device_communicator.all2all_manager).__name__
    return kernels
