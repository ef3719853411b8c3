"""Trace vLLM's modules that only run on GPUs, on two ranks under torchrun, and write the results as JSON.

Their kernels need a GPU, but their parameters and loaders do not. vLLM's refusals are patched: no sparse attention and no
experts without gates on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.map.trace import trace
from rlhf_mcore.readers.model_files import read_geometry
from tests.distributed import models
from tests.distributed.setting import finish
from tests.e2e.bridge.models import build, vllm_config
from tests.e2e.bridge.worker import check_replay

_HEADS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_head_dim": 128,
}
MODELS: dict[str, dict[str, int]] = {"deepseek_v32": _HEADS, "glm_moe_dsa": _HEADS, "nemotron_h": {}}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.environ["VLLM_DIST_IDENT"] = f"trace-{os.environ['MASTER_PORT']}"  # an engine would set it
    findings = {name: check(name, directory / name, changes) for name, changes in MODELS.items()}
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, findings)
    finish({name: [found[name] for found in everything] for name in MODELS}, directory)


def check(name: str, path: Path, changes: dict[str, int]) -> dict[str, Any]:
    if dist.get_rank() == 0:
        models.make(name, path, **changes)
    dist.barrier()
    _, config_class, _ = models.FURTHER_MODELS[name]
    shapes = hf_shapes(read_geometry(path))
    case: Any = SimpleNamespace(key=name, dtype="bfloat16")
    with as_on_a_gpu(), vllm_config(case, path.parent, 2, hf=config_class.from_pretrained(path)) as config:  # type: ignore[attr-defined]
        model = build(config, is_processed=False)
        found = trace(model, shapes, probe=False)
        generator = torch.Generator().manual_seed(5)
        weights = {key: (torch.randn(shape, generator=generator) / 8).bfloat16() for key, shape in shapes.items()}
        return {
            **check_replay(model, found, weights),
            "class": type(model).__module__,
            "received": sorted({piece.hf_name for parameter in found.parameters for piece in parameter.pieces}),
            "expected": sorted(shapes.keys() - set(found.unused)),
        }


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    import vllm.models.deepseek_v32 as of_platform
    from vllm.model_executor.layers.fused_moe import config as experts
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.models.deepseek_v32.nvidia.model import DeepseekV32ForCausalLM
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.get_attn_backend_cls

    def choose_dense(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        return choose(selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    with (
        mock.patch.object(CpuPlatform, "get_attn_backend_cls", staticmethod(choose_dense)),
        mock.patch.object(of_platform, "DeepseekV32ForCausalLM", DeepseekV32ForCausalLM),
        mock.patch.object(of_platform, "GlmMoeDsaForCausalLM", DeepseekV32ForCausalLM),
        mock.patch.object(experts, "current_platform", mock.Mock(is_cuda_alike=lambda: True)),
        mock.patch.object(
            method, "select_unquantized_moe_backend", lambda moe_config: (UnquantizedMoeBackend.TRITON, None)
        ),
    ):
        yield
