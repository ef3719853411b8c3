"""Rules for FP8 products (``actor.fp8``) and 8-bit engine weights (``rollout.quantization``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.families.quantised import cut_problems, quantisation_problems

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config
    from rlhf_mcore.geometry import ModelGeometry


_PLAIN = "or use actor.megatron={fp8: e4m3, fp8_recipe: blockwise}, whose weights differ from the engines'"


def fp8_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Check that other keys, and the model's sizes on a rank if they are known, allow FP8 products."""
    actor, name = cfg.actor, f"actor.fp8={cfg.actor.fp8}"
    if cfg.model.layer_spec == "local":
        yield f"{name}: Megatron's own layers (model.layer_spec=local) do not support FP8; set model.layer_spec=te"
    if cfg.model.dtype not in ("auto", "bf16"):
        yield f"{name}: model.dtype={cfg.model.dtype} is not supported; set model.dtype=bf16, or actor.fp8=null"
    for field in sorted(actor.megatron or {}):
        if field.startswith("fp8"):
            yield f"{name}: it sets actor.megatron.{field} too; remove one of them"
        elif field in ("fp4", "tp_comm_overlap", "first_last_layers_bf16") and (actor.megatron or {})[field]:
            yield f"{name} is not supported with actor.megatron.{field}; remove that, or set it to null"
    if actor.lora.rank is not None:
        yield f"{name}: adapters (actor.lora.rank={actor.lora.rank}) are not supported with FP8 products; set one of them to null"
    if actor.mtp.mode in MTP_TRAINED:
        yield f"{name} is not supported with actor.mtp.mode={actor.mtp.mode}; set that to keep"
    for problem in () if geometry is None else _size_problems(cfg, geometry):
        yield f"{name}: {problem}; set it to null, {_PLAIN}"


def _size_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """List reasons why a rank's blocks of 128x128 would differ from the blocks of the Hugging Face tensors."""
    layout, model = cfg.actor.layout, f"model.path={cfg.model.path}"
    unsupported = [f"{model}: not supported with {part}" for part in quantisation_problems(geometry)]
    yield from unsupported
    if unsupported:
        return
    if geometry.hidden_size % 16:
        yield f"{model}: hidden_size={geometry.hidden_size} is not a multiple of 16, as Transformer Engine requires"
    if geometry.head_dim % 128:
        blocks = "blocks of Megatron's fused queries, keys and values differ from the engines' blocks"
        yield f"{model}: the head size {geometry.head_dim} is not a multiple of 128, so {blocks}"
    elif geometry.num_kv_heads % layout.tp:
        yield f"actor.layout.tp={layout.tp} splits the {geometry.num_kv_heads} key heads"
    for problem in cut_problems(geometry, layout.tp, etp=layout.etp or layout.tp):
        yield f"actor.layout.tp={layout.tp}: {problem}"


def quantised_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Check that other keys and the model allow 8-bit engine weights."""
    name = f"rollout.quantization={cfg.rollout.quantization}"
    if cfg.bridge.method != "planned":
        yield f"{name}: bridge.method={cfg.bridge.method} sends whole tensors without quantisation; set it to planned"
    if cfg.rollout.speculative.method == "mtp" and (mode := cfg.actor.mtp.mode) not in MTP_TRAINED:
        loaded = f"with actor.mtp.mode={mode} engines load MTP layers from files, which are not quantised"
        yield f"{name}: rollout.speculative.method=mtp: {loaded}; set actor.mtp.mode=train, or that to off or ngram"
    for part in () if geometry is None else quantisation_problems(geometry):
        yield f"{name}: model.path={cfg.model.path} has {part}, which is not supported in 8 bits; set rollout.quantization=null"
