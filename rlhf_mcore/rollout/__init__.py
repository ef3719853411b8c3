"""Engines that generate responses in the trainer's processes. The only package that imports vllm, and that lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rollout.environment import prepare_environment
from rlhf_mcore.rollout.seeds import request_seed

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.protocols import RolloutEngine

__all__ = ["build_engine", "prepare_environment", "request_seed"]


def build_engine(cfg: RolloutConfig, **kwargs: Any) -> RolloutEngine:
    """The engine that ``cfg.engine`` names. Every rank calls it at the same time, with torch.distributed initialised.

    Args:
        cfg: the rollout group of the configuration.
        **kwargs: ``model_dir``, ``tokenizer_dir``, ``dtype`` ("fp32", "bf16", "fp16"), ``max_model_len`` (tokens of
            prompt and response), ``seed``: see the constructors, which take the same.

    Raises:
        ConfigError: no engine has that name.
    """
    if cfg.engine == "vllm":
        from rlhf_mcore.rollout.vllm_engine import VLLMEngine

        return VLLMEngine(cfg, **kwargs)
    if cfg.engine == "hf":
        from rlhf_mcore.rollout.hf_engine import HFEngine

        return HFEngine(cfg, **kwargs)
    raise ConfigError(f"rollout.engine={cfg.engine!r} is not an engine; use vllm or hf")
