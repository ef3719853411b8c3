"""Bytes that a node reads from storage when a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from rlhf_mcore.config.schema import Config
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import Elements, stage_elements
from rlhf_mcore.planning.inputs import PlanInputs, PlannedRole
from rlhf_mcore.readers.model_files import stored_format_of
from rlhf_mcore.readers.stored_formats import GROUP

_WIDTH = 2  # bytes of a bf16 element


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """The bytes of model files that a node reads, and the duration."""

    node_bytes: int
    seconds: float


def load_of(inputs: PlanInputs) -> LoadEstimate:
    """Estimate the start. Each rank reads its part of a model, and each node reads each byte of a directory once.

    The files' sizes count if they are on this machine. A run that continues from a checkpoint reads more.
    """
    sizes: dict[str, float] = {}
    for role in inputs.roles:
        if path := _path_of(role, inputs.cfg):
            sizes[path] = max(sizes.get(path, 0.0), _node_bytes(role, path, inputs.gpu.per_node))
    total = int(sum(sizes.values()))
    return LoadEstimate(total, total / inputs.gpu.storage_bytes_per_s)


def _path_of(role: PlannedRole, cfg: Config) -> str | None:
    """Return the directory of a model's weights. The average of a policy is not read."""
    name, _, source = role.name.removesuffix("]").partition("[")
    if name == "teacher":
        return (cfg.teacher.sources or {}).get(source, cfg.teacher.path)
    paths = {"critic": cfg.critic.path, "reference": cfg.reference.path, "reward": cfg.reward.model.path}
    return paths.get(name) or cfg.model.path


def _node_bytes(role: PlannedRole, path: str, per_node: int) -> float:
    """Count the stored bytes of the layers and experts that the ranks of a node hold together."""
    layout, whole = role.layout, stage_elements(role.geometry, ParallelLayout(1), 0)
    per_stage = layout.world_size // layout.pp
    stages = min(1.0, -(-per_node // per_stage) / layout.pp)
    experts = min(1.0, per_node / min(per_stage, layout.ep * layout.expert_tp))
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) or _stored_bytes(whole, path)
    return stored * stages * (whole.ends + whole.layers + experts * whole.experts) / whole.total


def _stored_bytes(whole: Elements, path: str) -> float:
    """Estimate files that are not on this machine from config.json. fp8 formats quantise all layers, 4-bit formats experts."""
    if (stored := stored_format_of(path)) is None:
        return _WIDTH * whole.total
    narrow = whole.in_layers if stored.method == "fp8" or not whole.experts else whole.experts
    bits, block = (stored.bits or ((8,) if stored.blocks else (4,)))[0], prod((stored.blocks or ((1, GROUP),))[0])
    scale = {"fp8": 4, "mxfp4": 1}.get(stored.method, _WIDTH)
    return _WIDTH * (whole.total - narrow) + narrow * (bits / 8 + scale / block)
