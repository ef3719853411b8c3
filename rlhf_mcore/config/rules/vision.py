"""Whether a model that reads images can be trained, in this layout and beside what else is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mcore.config.derive import balanced_stages
from rlhf_mcore.config.implied import needs_critic
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import ModelGeometry


def vision_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """List problems with ``actor.vision``, and with the tower of ``model.path``, whose ``geometry`` this is."""
    train = f"actor.vision.train={cfg.actor.vision.train}"
    if geometry.vision is None:
        yield f"{train}: model.path={cfg.model.path} reads no images; set it to none"
        return
    if cfg.actor.vision.train != "none" and (cfg.actor.megatron or {}).get("overlap_grad_reduce"):
        yield f"{train} is not supported with actor.megatron.overlap_grad_reduce; remove that"
    for role in ("actor", *(("critic",) if needs_critic(cfg) else ())):
        layout = getattr(cfg, role).layout
        sizes = layout.layers_per_stage or balanced_stages(geometry.num_layers, layout.pp * (layout.vpp or 1))
        if sizes[0] < geometry.vision.deepstack:
            yield (
                f"{role}.layout: the first pipeline stage has {sizes[0]} layers, and images speak to the first "
                f"{geometry.vision.deepstack} of model.path (DeepStack); lower pp or vpp, or give it more with layers_per_stage"
            )
