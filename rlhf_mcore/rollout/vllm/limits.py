"""Find configurations that vLLM cannot run, before it is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.schema.rollout import truncates
from rlhf_mcore.families import FAMILIES, UNSUPPORTED
from rlhf_mcore.families.adapters import EMBEDDING, OUTPUT, is_target
from rlhf_mcore.families.mixture import BiasedMixture
from rlhf_mcore.families.quantised import cut_problems
from rlhf_mcore.foreign import shorten
from rlhf_mcore.geometry import LatentSizes
from rlhf_mcore.machine import has_gpu, processor
from rlhf_mcore.readers.adapter_files import adapted_modules
from rlhf_mcore.rollout.vllm import token_records

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import ModelConfig, RolloutConfig
    from rlhf_mcore.geometry import ModelGeometry


# Packages that vLLM's modules for these families need, but vLLM does not require.
IMPORTS = dict.fromkeys(
    ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_vl", "qwen3_vl_moe"),
    "torchvision",
)
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # supported sizes of an engine's buffers
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head sizes of vLLM's CPU attention


def model_problems(
    cfg: RolloutConfig, model: ModelConfig, geometry: ModelGeometry, *, records_routes: bool
) -> Iterator[str]:
    """Yield problems of the model with vLLM: missing packages, and parts that its CPU build does not support."""
    if (package := IMPORTS.get(geometry.family)) is not None and find_spec(package) is None:
        yield (
            f"rollout.engine=vllm: vLLM's code of model.path={model.path} imports {package}, which is not installed; "
            f"install the {package} that goes with this torch, or set rollout.engine=hf"
        )
    if (vision := FAMILIES.get(geometry.family, UNSUPPORTED).vision) is not None and vision.attends_within:
        yield (
            f"rollout.engine=vllm: image tokens of model.path={model.path} attend to each other, which vLLM engines do not "
            "support yet; set rollout.engine=hf"
        )
    indexer = geometry.attention.indexer if isinstance(geometry.attention, LatentSizes) else None
    if indexer is not None and indexer.shared_layers and cfg.layout.pp > 1:
        yield (
            f"rollout.layout.pp={cfg.layout.pp}: layers of model.path={model.path} share selected keys, which vLLM's stages do "
            "not send to each other; set it to 1"
        )
    yield from _grid_problems(cfg, geometry, records_routes)
    if not has_gpu():
        yield from _cpu_problems(model, geometry)
        yield from _convolution_problems(cfg.layout.tp, model, geometry)
    elif cfg.quantization is not None:
        yield from _quantised_problems(cfg, model, geometry)


def _grid_problems(cfg: RolloutConfig, geometry: ModelGeometry, records_routes: bool) -> Iterator[str]:
    """Yield combinations that are not tested with pipeline or data parallelism of an engine."""
    others = {
        "rollout.sampling.top_p below 1 or top_k": truncates(cfg.sampling),
        "actor.router_replay=rollout": records_routes,
        "vision models": geometry.vision is not None,
    }
    of_records = [other for other, is_asked in others.items() if is_asked]
    for key in ("pp", "dp"):
        size = getattr(cfg.layout, key)
        for other in of_records if size > 1 else ():
            yield f"rollout.layout.{key}={size} is not supported with {other}; set it to 1"


def adapter_problems(cfg: RolloutConfig, geometry: ModelGeometry) -> Iterator[str]:
    """Yield reasons why vLLM cannot add adapters. ``geometry`` includes the adapters."""
    assert geometry.adapter is not None
    if any(is_target(module, geometry) for module in (EMBEDDING, OUTPUT)):
        yield "vLLM does not support adapters of the embedding or the output layer"
    if geometry.experts is not None:
        yield from _mixture_problems(geometry)
    if isinstance(geometry.attention, LatentSizes):
        yield "vLLM does not support adapters in latent attention, because it absorbs projections"
    if geometry.wide is not None and geometry.wide.keys_are_values:
        yield "vLLM does not add the adapters of keys to values, which are the same projection here"
    if geometry.recurrent_part is not None:
        yield f"vLLM fuses the layers of {geometry.recurrent_part} differently from their adapters"
    if geometry.adapter.use_dora:
        yield "vLLM does not support the magnitudes of DoRA"
    if geometry.adapter.rank not in ADAPTER_RANKS:
        which = "twice actor.lora.rank" if geometry.adapter.fixed else "actor.lora.rank"
        yield f"vLLM supports the ranks {', '.join(map(str, ADAPTER_RANKS))}, not {which}={geometry.adapter.rank}"
    if cfg.quantization is not None:
        yield f"adapters cannot be added to quantised weights (rollout.quantization={cfg.quantization})"
    if (layout := cfg.layout).num_ranks > layout.tp or layout.ep > 1:
        yield "adapters are not tested with rollout.layout.pp, dp or ep above 1"
    if cfg.speculative.method != "off":
        yield f"adapters are not tested with rollout.speculative.method={cfg.speculative.method}"


def _quantised_problems(cfg: RolloutConfig, model: ModelConfig, geometry: ModelGeometry) -> Iterator[str]:
    """Yield problems with 8-bit weights of vLLM on a GPU."""
    name, layout = f"rollout.quantization={cfg.quantization}", cfg.layout
    if model.dtype == "fp32":
        yield f"{name}: vLLM's 8-bit layers do not support model.dtype=fp32; set it to bf16"
    problems = cut_problems(geometry, layout.tp, layout.dp, layout.ep) if cfg.quantization == "fp8" else ()
    keys, sharers = f"rollout.layout.tp={layout.tp}" + f" and dp={layout.dp}" * (layout.dp > 1), layout.tp * layout.dp
    is_cured = sharers > 1 and not any(cut_problems(geometry, layout.tp, layout.dp, sharers))
    choice = "choose another rollout.layout.tp" + f", whole experts (rollout.layout.ep={sharers})" * is_cured
    for problem in problems:
        yield (
            f"{name}: {keys} splits 128x128 blocks of model.path={model.path} ({problem}), which "
            f"vLLM's layers do not support; {choice}, or rollout.quantization=int8"
        )


def _mixture_problems(geometry: ModelGeometry) -> Iterator[str]:
    others = [module for module in adapted_modules(geometry) if ".self_attn." not in module]
    if others:
        yield f"in models with experts, vLLM supports adapters in attention only, not in {others[0]}"
    if FAMILIES[geometry.family].has_stacked_experts:
        yield "in models with all experts of a layer in one tensor, vLLM's attention and its adapters have different names"


def _cpu_problems(model: ModelConfig, geometry: ModelGeometry) -> Iterator[str]:
    latent, delta = isinstance(geometry.attention, LatentSizes), geometry.delta
    part, needed = "latent attention", "kv_lora_rank=512"
    if isinstance(geometry.attention, LatentSizes) and geometry.attention.indexer is not None:
        yield f"rollout.engine=vllm: on a CPU vLLM has no sparse attention for model.path={model.path}; set rollout.engine=hf"
        return
    is_met = not isinstance(geometry.attention, LatentSizes) or geometry.attention.kv_rank == 512
    if delta is not None:
        part, needed = "gated delta nets", "linear_key_head_dim and linear_value_head_dim both 64 or both 128"
        is_met = (delta.key_dim, delta.value_dim) in ((64, 64), (128, 128))
    if (latent or delta is not None) and (model.dtype != "bf16" or not is_met):
        yield (
            f"rollout.engine=vllm: on a CPU vLLM computes the {part} of model.path={model.path} in bf16 and with {needed} only; "
            f"set {'model.dtype=bf16 or ' if is_met else ''}rollout.engine=hf"
        )
    if isinstance(FAMILIES.get(geometry.family, UNSUPPORTED).mixture, BiasedMixture):
        yield (
            f"rollout.engine=vllm: on a CPU vLLM cannot choose the experts of model.path={model.path} by sigmoids without "
            "groups; set rollout.engine=hf"
        )
    if geometry.experts is not None and not FAMILIES.get(geometry.family, UNSUPPORTED).has_gates:
        yield f"rollout.engine=vllm: on a CPU vLLM has no experts without gates for model.path={model.path}; set rollout.engine=hf"
    instructions = processor().split()
    if delta is not None and "avx512f" in instructions and "avx512_bf16" not in instructions:
        yield (
            f"rollout.engine=vllm: on a processor with AVX-512 vLLM computes the gated delta nets of model.path={model.path} with "
            "its bf16 instructions (avx512_bf16), which this one lacks; set rollout.engine=hf, or use another processor"
        )
    for attention, layers in () if latent else geometry.attentions:
        if layers and attention.head_dim not in CPU_HEAD_SIZES:
            yield (
                f"rollout.engine=vllm: on a CPU vLLM supports the head sizes {', '.join(map(str, CPU_HEAD_SIZES))}, but "
                f"model.path={model.path} has head_dim={attention.head_dim}; set rollout.engine=hf"
            )


def _convolution_problems(tp: int, model: ModelConfig, geometry: ModelGeometry) -> Iterator[str]:
    """Reject channels of state spaces that vLLM's CPU kernel for 16 bits cannot pack."""
    if (space := geometry.space) is None or model.dtype == "fp32":
        return
    channels = space.inner // tp + 2 * space.state_dim * max(space.groups // tp, 1)
    if channels % 32:
        yield (
            f"rollout.engine=vllm: on a CPU vLLM convolves multiples of 32 channels in {model.dtype}, but a rank has {channels} of "
            f"model.path={model.path}; set rollout.engine=hf, or another rollout.layout.tp"
        )


def problem_of(message: str, options: Mapping[str, Any], cfg: RolloutConfig, *, on_cuda: bool) -> str | None:
    """Return our message for a vLLM start error that the configuration has caused, or None for other errors."""
    if "larger than the available KV cache memory" in message or "for the cache blocks" in message:
        key = "gpu_memory_utilization" if on_cuda else "kv_cache_gib"
        return (
            f"rollout.{key}={getattr(cfg, key)}: the cache of an engine is too small for one prompt and response of "
            f"rollout.max_model_len={options['max_model_len']} tokens; raise it, or lower data.max_prompt_tokens or "
            "rollout.sampling.max_new_tokens"
        )
    if memory := re.search(r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\)", message):
        free, total = memory.groups()
        return (
            f"rollout.gpu_memory_utilization={cfg.gpu_memory_utilization}: an engine needs that share of its device ({total} GiB), "
            f"but only {free} GiB are free at its start; lower it, stop other processes on the device (nvidia-smi), or offload the "
            "models (actor.offload, reference.offload)"
        )
    if "AuxOutput Connector requires Model Runner V2" in message:
        return (
            f"actor.router_replay=rollout: vLLM records routes only with a model runner that does not support {options['model']}; "
            "set it to old_logprobs or off"
        )
    if "requires Model Runner V2" in message:
        return token_records.not_recorded(cfg.sampling, options["model"])
    if "MoE backend supports the deployment" in message:
        return (
            f"rollout.layout.tp={cfg.layout.tp}: vLLM has no kernel for these shards of experts of {options['model']} (CPU kernels "
            "require multiples of 32 for the hidden size and, in gpt-oss, for the expert size over tp); choose another tp, or set "
            "rollout.engine=hf"
        )
    if cfg.vllm:
        shown, reason = shorten(repr(cfg.vllm), 300), shorten(" ".join(message.split()), 500)
        return f"rollout.vllm={shown}: vLLM does not start with these arguments ({reason}); change or remove them"
    return None
