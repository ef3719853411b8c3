"""Say what keeps vLLM from starting, in the words of this program's configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig


def problem_of(message: str, options: Mapping[str, Any], cfg: RolloutConfig, *, on_cuda: bool) -> str | None:
    """Return the message in place of vLLM's about a start, where configuration is the cause."""
    if "larger than the available KV cache memory" in message or "for the cache blocks" in message:
        key = "gpu_memory_utilization" if on_cuda else "kv_cache_gib"
        return (
            f"rollout.{key}={getattr(cfg, key)}: the cache of an engine does not hold one prompt and response of "
            f"rollout.max_model_len={options['max_model_len']} tokens; raise it, or lower data.max_prompt_tokens or "
            "rollout.sampling.max_new_tokens"
        )
    if memory := re.search(r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\)", message):
        free, total = memory.groups()
        return (
            f"rollout.gpu_memory_utilization={cfg.gpu_memory_utilization}: an engine takes that share of its device's {total} GiB, of "
            f"which {free} are free when it starts; lower it, end what else uses the device (nvidia-smi), or have the models leave "
            "it (actor.offload, reference.offload)"
        )
    if "AuxOutput Connector requires Model Runner V2" in message:
        return (
            f"actor.router_replay=rollout: vLLM returns routes with a model runner that it does not have for {options['model']}; "
            "set it to old_logprobs or off"
        )
    if "requires Model Runner V2" in message:
        from rlhf_mcore.rollout.vllm import masks

        return masks.not_recorded(cfg.sampling, options["model"])
    if "MoE backend supports the deployment" in message:
        return (
            f"rollout.layout.tp={cfg.layout.tp}: vLLM has no kernel for experts of {options['model']} that are cut so (those for a "
            "CPU take multiples of 32, of the hidden size and, in gpt-oss, of an expert's size over tp); choose another tp, or set "
            "rollout.engine=hf"
        )
    return None
