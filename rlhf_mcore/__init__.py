"""rlhf_mcore: reinforcement learning from feedback on Megatron-core, with vLLM rollouts in the same processes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_mcore.api import (
        Callback,
        Config,
        ConfigError,
        Evaluation,
        Trained,
        Trainer,
        convert,
        evaluate,
        load_config,
        plan,
        train,
    )

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Config",
    "ConfigError",
    "Evaluation",
    "Trained",
    "Trainer",
    "convert",
    "evaluate",
    "load_config",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import the Python API (``rlhf_mcore.api``) on first use, so that commands start without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("rlhf_mcore.api"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
