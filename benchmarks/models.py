"""Large models for planning without a GPU: their sizes, and the tensors of trainer and engine ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rlhf_mcore.bridge.map.pieces import Place
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.questions import balanced_stages
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import EngineGrid
from tests import engine_layout
from tests.trainer_layout import stage_names, trainer_places


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model."""

    name: str
    geometry: ModelGeometry


LLAMA_70B = Model("70B", ModelGeometry("llama", 80, 8192, GroupedSizes(64, 8, 128), 28672, 128256, False))
QWEN_235B = Model(
    "235B-A22B",
    ModelGeometry(
        "qwen3_moe",
        94,
        4096,
        GroupedSizes(64, 4, 128),
        12288,
        151936,
        False,
        experts=ExpertSizes(128, 1536, per_token=8),
    ),
)


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every Hugging Face tensor, in network order."""
    return hf_shapes(model.geometry)


def model_bytes(model: Model) -> int:
    """Return the bytes of all tensors in bf16."""
    return 2 * sum(prod(shape) for shape in shapes(model).values())


def trainer_layout(model: Model, ranks: int, tp: int, pp: int, ep: int = 1) -> ParallelLayout:
    """Return a layout with stages of nearly equal size and whole experts per rank (expert tensor parallelism 1)."""
    stages = tuple(balanced_stages(model.geometry.num_layers, pp))
    return ParallelLayout(ranks, tp=tp, pp=pp, ep=ep, etp=1 if ep > 1 else None, layers_per_stage=stages)


def sources(model: Model, layout: ParallelLayout) -> list[Place]:
    """Return the places of trainer ranks, with Transformer Engine's layers."""
    return trainer_places(stage_names(model.geometry, layout, fused=True), model.geometry, layout)


def destinations(model: Model, tp: int, num_engines: int, first_rank: int = 0) -> list[Place]:
    """Return the places that engine ranks need."""
    return engine_layout.destinations(model.geometry, EngineGrid(tp), num_engines, first_rank)
