"""The reference engine: a transformers model that decodes token by token. Start reading at ``engine``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_mcore.config.engine_kinds import EngineKind

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.rollout.engine import Engine, EngineModel


@dataclass(frozen=True, slots=True)
class _HF(EngineKind):
    def preload(self) -> None:
        from transformers import AutoModelForCausalLM  # noqa: F401

    def build(self, cfg: RolloutConfig, model: EngineModel) -> Engine:
        from rlhf_mcore.rollout.hf.engine import HFEngine

        return HFEngine(cfg, model)


KIND = _HF(
    "hf",
    attention_kernels=("eager", "sdpa", "flash_attention_2"),
    own_keys=("rollout.quantization",),
)
