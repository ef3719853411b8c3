"""Tiny architectures, their tensors in the checkpoint format, and their vLLM modules without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_mcore.rollout.vllm.environment import private_shared_memory

HIDDEN, VOCABULARY, EXPERTS = 64, 97, 4


@dataclass(frozen=True)
class Case:
    """An architecture. ``key`` is its name in results."""

    family: str
    is_tied: bool
    num_kv_heads: int
    dtype: str = "float32"

    @property
    def key(self) -> str:
        return f"{self.family}-{'tied' if self.is_tied else 'untied'}-kv{self.num_kv_heads}-{self.dtype}"


MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "minimax_m2")
_LIKE_MIXTRAL = ("mixtral", "minimax_m2")  # names of experts
CASES = (
    Case("qwen3_moe", False, 2),  # must be first, because vLLM builds its expert-parallel group only for MoE models
    Case("mixtral", False, 1),
    Case("qwen2_moe", False, 2),
    Case("qwen2", False, 1),
    Case("qwen3", True, 1),
    Case("qwen3", False, 2),
    Case("llama", False, 2),
    Case("llama", True, 1),
    Case("mistral", True, 2),
    Case("qwen2", True, 2, "bfloat16"),
    Case("qwen3_moe", True, 1, "bfloat16"),
    Case("minimax_m2", False, 2),  # a norm over the heads of all ranks, and a router bias outside of the router
)
# Tensor-parallel sizes of each case. All pairs of size, number of heads, tied embeddings and kind of family occur.
SIZES = {
    1: tuple(CASES[number] for number in (0, 2, 3, 5, 6, 7, 10, 11)),
    2: tuple(CASES[number] for number in (0, 1, 2, 4, 7, 8, 9, 11)),
}


def hf_config(case: Case) -> Any:
    import transformers

    stem = "".join(part.capitalize() for part in case.family.split("_")).replace("Minimax", "MiniMax")
    sizes: dict[str, Any] = {
        "architectures": [f"{stem}ForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 if case.family.startswith("qwen2") else 4,
        "num_key_value_heads": case.num_kv_heads,
        "max_position_embeddings": 256,
        "tie_word_embeddings": case.is_tied,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if not case.family.startswith("qwen2"):  # qwen2 has no such key, and 64 / 2 heads = 32
        sizes["head_dim"] = 32
    if case.family in ("qwen3_moe", "qwen2_moe"):
        sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    if case.family == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 96
    if case.family == "minimax_m2":
        sizes |= {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}
    if case.family in _LIKE_MIXTRAL:
        sizes |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    return getattr(transformers, f"{stem}Config")(**sizes)


def checkpoint_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint, written by hand from the published checkpoints of each family."""
    heads, width = (2, 64) if case.family.startswith("qwen2") else (4, 128)
    key_width = width // heads * case.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        for name, rows in (("q", width), ("k", key_width), ("v", key_width)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if case.family.startswith("qwen2"):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, width)
        if case.family.startswith("qwen3"):
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (32,) for name in "qk"}
        if case.family == "minimax_m2":
            shapes |= {f"{prefix}self_attn.q_norm.weight": (width,), f"{prefix}self_attn.k_norm.weight": (key_width,)}
            shapes[prefix + "block_sparse_moe.e_score_correction_bias"] = (EXPERTS,)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        shapes |= _mlp_shapes(case, prefix)
    shapes["model.norm.weight"] = (HIDDEN,)
    if not case.is_tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return shapes


def _mlp_shapes(case: Case, prefix: str) -> dict[str, tuple[int, ...]]:
    if case.family not in MIXTURES:
        return _gated_shapes(prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"))
    block = prefix + ("block_sparse_moe." if case.family in _LIKE_MIXTRAL else "mlp.")
    names = ("w1", "w3", "w2") if case.family in _LIKE_MIXTRAL else ("gate_proj", "up_proj", "down_proj")
    shapes = {block + "gate.weight": (EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        shapes |= _gated_shapes(f"{block}experts.{expert}.", names)
    if case.family == "qwen2_moe":
        shapes |= {f"{block}shared_expert_gate.weight": (1, HIDDEN)} | _gated_shapes(f"{block}shared_expert.", names)
    return shapes


def _gated_shapes(prefix: str, names: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (96, HIDDEN), up: (96, HIDDEN), down: (HIDDEN, 96)}


def random_weights(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """Return random full tensors of a checkpoint, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    return {
        name: (torch.randn(shape, generator=generator) / 8).to(dtype) for name, shape in checkpoint_shapes(case).items()
    }


@contextmanager
def vllm_config(
    case: Case, directory: Path, tp: int, pp: int = 1, dp: int = 1, ep: int = 1, hf: Any = None
) -> Iterator[Any]:
    """Set vLLM's configuration of a case as the current one, with its process groups. Yields the configuration.

    ``hf`` replaces the case's config.json.
    """
    import torch.distributed as dist
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs

    target = directory / f"{case.key}-tp{tp}-rank{dist.get_rank()}"
    (hf or hf_config(case)).save_pretrained(target)
    config = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=case.dtype,  # type: ignore[arg-type]
        max_model_len=64,
        enforce_eager=True,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        data_parallel_size=dp,
        enable_expert_parallel=ep > 1,
        distributed_executor_backend="external_launcher",
        kv_cache_memory_bytes=1 << 22,
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(dist.get_world_size(), dist.get_rank(), "env://", 0, "gloo")
        with private_shared_memory():  # shared memory of a killed run may still use vLLM's own name
            ensure_model_parallel_initialized(tp, pp)
        yield config


def build(config: Any, *, is_processed: bool) -> Any:
    """Build the module of a worker with dummy weights, packed for CPU kernels if ``is_processed``.

    This takes milliseconds; an engine takes seconds.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    loader = get_model_loader(config.load_config)
    config.compilation_config.static_forward_context.clear()  # otherwise the names of attention layers would already exist
    with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
        model = loader.create_model(config, config.model_config)
        loader.load_weights(model, config.model_config)
        if is_processed:
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model
