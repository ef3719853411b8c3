"""Compare the values that a bridge writes to vLLM's 8-bit MTP layer, as in an engine on CUDA, with vLLM's loaders."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.map.rules import Shapes, hf_shapes
from rlhf_mcore.bridge.map.trace import trace
from rlhf_mcore.config.schema import RolloutConfig, SpeculativeConfig
from rlhf_mcore.families.quantised import QUANTISATIONS, Quantisation
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.vllm.arguments import quantised_options
from rlhf_mcore.rollout.vllm.drafts import DraftedModel, learned_names
from rlhf_mcore.rollout.vllm.environment import private_shared_memory
from tests.e2e.bridge.eight_bits import equal, fill, quantise_weights
from tests.e2e.processors import layers_of_8_bits

# Each of two ranks holds whole blocks of 128x128.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def check(model: Path, directory: Path) -> dict[str, Any]:
    """Return the names of tensors that differ on this rank of two, and of the draft's 8-bit tensors.

    They are fp8, because on a CPU vLLM 0.32 has no int8 experts with the routing of GLM-4.5.
    """
    if dist.get_rank() == 0:
        directory.mkdir()
        text = json.loads((model / "config.json").read_text()) | SIZES
        (directory / "config.json").write_text(json.dumps(text))
    dist.barrier()
    geometry = replace(load_spec(directory, needs_weights=False).geometry, mtp_layers=1)
    return _check(directory, hf_shapes(geometry), QUANTISATIONS["fp8"])


@torch.no_grad()
def _check(directory: Path, shapes: Shapes, kind: Quantisation) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    weights = {name: (torch.randn(shape, generator=generator) / 8).bfloat16() for name, shape in shapes.items()}
    sent = quantise_weights(weights, kind)
    with ExitStack() as stack:
        stack.enter_context(layers_of_8_bits())
        model = _build_drafted(directory, shapes, kind, stack)
        engine = trace(model, kind.with_scales(shapes), probe=False)
        filled = [parameter for parameter in engine.parameters if parameter.pieces]
        written = {p.name: torch.zeros(p.shape, dtype=p.dtype) for p in filled}
        for parameter in filled:
            fill(parameter, written[parameter.name].view(-1), sent)
        model.load_weights(iter(sent.items()))
    live = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    return {
        "other than vLLM loads": [name for name, tensor in written.items() if not equal(tensor, live[name])],
        "8 bits": sorted(n for n, tensor in written.items() if n.startswith("draft.") and tensor.itemsize == 1),
        "unused": list(engine.unused),
    }


def _build_drafted(directory: Path, shapes: Shapes, kind: Quantisation, stack: ExitStack) -> DraftedModel:
    """Build the modules of an engine's worker, before vLLM packs them for kernels."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.spec_decode.eagle import EagleProposer

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": 64,
        "enforce_eager": True,
        "tensor_parallel_size": dist.get_world_size(),
        "distributed_executor_backend": "external_launcher",
        "kv_cache_memory_bytes": 1 << 22,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }
    config: Any = EngineArgs(
        model=str(directory), **arguments, **quantised_options(kind.name, shapes)
    ).create_engine_config()
    stack.enter_context(set_current_vllm_config(config))
    init_distributed_environment(dist.get_world_size(), dist.get_rank(), "env://", 0, "gloo")
    with private_shared_memory():
        ensure_model_parallel_initialized(dist.get_world_size(), 1)
    loader = get_model_loader(config.load_config)
    with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
        model = loader.create_model(config, config.model_config)
        draft = loader.create_model(config, config.speculative_config.draft_model_config)
    proposer: Any = SimpleNamespace(model=draft, vllm_config=config, use_local_argmax_reduction=False)
    EagleProposer._maybe_share_embeddings(proposer, model)
    EagleProposer._maybe_share_lm_head(proposer, model)
    cfg = RolloutConfig(speculative=SpeculativeConfig(method="mtp"), quantization=kind.name)
    return DraftedModel(
        model, draft, learned_names(cfg, EngineModel(str(directory), str(directory), "bf16", 64, 0, shapes))
    )
