"""Rules of ``rollout.quantization``: what it does not go with, of other keys and of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.families.quantised import quantisation_problems

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config
    from rlhf_mcore.geometry import ModelGeometry


def quantised_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Check what weights of 8 bits ask of other keys, and of the model."""
    name = f"rollout.quantization={cfg.rollout.quantization}"
    if cfg.bridge.method != "planned":
        yield f"{name}: bridge.method={cfg.bridge.method} hands whole tensors to engines, as they are; set it to planned"
    if cfg.bridge.verify == "full":
        yield f"{name}: bridge.verify=full compares with a load of tensors that have no 8 bits; set it to digest"
    if cfg.rollout.speculative.method == "mtp" and (mode := cfg.actor.mtp.mode) not in MTP_TRAINED:
        yield (
            f"{name}: rollout.speculative.method=mtp: engines read MTP layers of actor.mtp.mode={mode} from files, where they have no "
            "8 bits; set actor.mtp.mode=train, or rollout.speculative.method=off or ngram"
        )
    for problem in () if geometry is None else quantisation_problems(geometry):
        yield f"{name}: model.path={cfg.model.path}: {problem}, which is not quantised here; set rollout.quantization=null"
