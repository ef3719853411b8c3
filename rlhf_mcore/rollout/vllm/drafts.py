"""Speculative decoding (Leviathan et al. 2022, arXiv 2211.17192): what vLLM is told of how an engine drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import SpeculativeConfig


def draft_options(cfg: SpeculativeConfig, *, on_cuda: bool) -> dict[str, Any]:
    """Return arguments of vllm.LLM.

    MTP layers are loaded from the model's directory when the engine starts, and stay as they are. Their embedding and output layer
    are the model's own modules, and come with it.

    Raises:
        ConfigError: drafts on CUDA, where they have not been run, and where a sleep would discard the MTP layers.
    """
    if cfg.method == "off":
        return {}
    if on_cuda:
        raise ConfigError(f"rollout.speculative.method={cfg.method} is not supported on CUDA; set it to off")
    options: dict[str, Any] = {"method": cfg.method, "num_speculative_tokens": cfg.num_tokens}
    if cfg.method == "ngram":
        options |= {"prompt_lookup_min": cfg.ngram_tokens, "prompt_lookup_max": cfg.ngram_tokens}
    else:
        options["draft_load_config"] = {"load_format": "safetensors"}
    return {"speculative_config": options}
