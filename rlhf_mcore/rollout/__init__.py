"""Engines that generate responses in the trainer's processes. The only package that imports vllm, and that lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rollout.engine import Engine, EngineModel
from rlhf_mcore.rollout.environment import prepare_environment

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig

__all__ = ["Engine", "EngineModel", "build_engine", "preload_engine", "prepare_environment"]


def build_engine(cfg: RolloutConfig, model: EngineModel) -> Engine:
    """The engine that ``cfg.engine`` names. Every rank calls it at the same time, with torch.distributed initialised.

    Raises:
        ConfigError: no engine has that name, or it cannot be built: see the constructors.
    """
    if cfg.engine == "vllm":
        from rlhf_mcore.rollout.vllm_engine import VLLMEngine

        return VLLMEngine(cfg, model)
    if cfg.engine == "hf":
        from rlhf_mcore.rollout.hf_engine import HFEngine

        return HFEngine(cfg, model)
    raise ConfigError(f"rollout.engine={cfg.engine!r} is not an engine; use vllm or hf")


def preload_engine(name: str) -> None:
    """Import what ``build_engine`` will on a CPU, in a process that ranks are to be forks of."""
    if name == "vllm":
        from rlhf_mcore.rollout.vllm_engine import preload

        preload()
    else:
        from transformers import AutoModelForCausalLM  # noqa: F401
