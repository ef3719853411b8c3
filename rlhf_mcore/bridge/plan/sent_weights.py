"""Derive the weights that engines receive from a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.questions import adapter_sizes
from rlhf_mcore.families.quantised import FP8_OF_TRAINING
from rlhf_mcore.geometry import ModelGeometry

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


def sent_geometry(cfg: Config, geometry: ModelGeometry) -> ModelGeometry:
    """Return the geometry of the weights that engines receive. It includes MTP layers if they are trained and engines use them."""
    drafts = engine_kind(cfg.rollout.engine).reads("rollout.speculative") and cfg.rollout.speculative.method == "mtp"
    return geometry if drafts and cfg.actor.mtp.mode in MTP_TRAINED else geometry.trunk


def sent_quantisation(cfg: Config) -> str | None:
    """Return the quantisation of sent weights. If the policy is trained in FP8, it is the same as in training."""
    if cfg.rollout.quantization != "fp8" or cfg.actor.fp8 is None:
        return cfg.rollout.quantization
    return FP8_OF_TRAINING


def sends_adapters(cfg: Config, geometry: ModelGeometry) -> bool:
    """Return whether engines receive A and B separately. Otherwise they receive weights with the adapters merged."""
    sizes = adapter_sizes(cfg.actor.lora)
    if sizes is None or cfg.actor.lora.sync == "merge":
        return False
    return not any(engine_kind(cfg.rollout.engine).adapter_problems(cfg.rollout, replace(geometry, adapter=sizes)))
