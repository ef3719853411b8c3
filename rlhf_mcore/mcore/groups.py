"""Build the process groups of a model from its layout. All code receives these groups as arguments.

Each model has its own collection, so an actor and a critic with different layouts can live in the same world.
Megatron's ``parallel_state`` is never initialised. A few places in Megatron-core still read its globals. Within
:func:`use_groups` they read this collection's groups.

The module also defines the communication within a pass: messages between pipeline stages, and sums over a group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform
from rlhf_mcore.platform.megatron_versions import LATER_GLOBALS
from rlhf_mcore.types import Microbatch


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """A layout and its process groups, from the view of one rank."""

    layout: ParallelLayout
    collection: ProcessGroupCollection

    @property
    def tp_rank(self) -> int:
        return self.collection.tp.rank()

    @property
    def cp_rank(self) -> int:
        return self.collection.cp.rank()

    @property
    def pp_rank(self) -> int:
        return self.collection.pp.rank()

    @property
    def dp_rank(self) -> int:
        return self.collection.dp.rank()


class GroupPool:
    """Process groups by their ranks. Axes with the same ranks share one group, even across models.

    A group is not free: gloo runs threads that wake 100 times per second for each group, and NCCL allocates buffers.
    The pool never returns the default group of the process, because Megatron's unbatched pipeline exchange requires a
    separate group for the pipeline. ``timeout`` limits the wait for other ranks in a collective; None: torch's
    default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def group_of(self, enumeration: list[list[int]]) -> dist.ProcessGroup | None:
        """Return this rank's group from a list of disjoint groups, or None if no group contains it.

        Collective over the world.
        """
        named = {rank for ranks in enumeration for rank in ranks}
        # new_subgroups_by_enumeration requires a group for every rank of the world. Each remaining rank gets its own.
        alone = [[rank] for rank in range(dist.get_world_size()) if rank not in named]
        key = tuple(sorted(map(tuple, enumeration + alone)))
        if key not in self._groups:
            self._groups[key], _ = dist.new_subgroups_by_enumeration(
                [list(ranks) for ranks in key], timeout=self._timeout
            )
        return self._groups[key] if dist.get_rank() in named else None


def build_groups(layout: ParallelLayout, pool: GroupPool | None = None) -> ModelGroups | None:
    """Build the process groups of a layout. Return None on ranks outside the layout.

    Collective: every rank of the world calls it with the same layout and pool.
    """
    pool = pool or GroupPool()
    grid = HyperCommGrid(
        [layout.tp, layout.cp, layout.dp, layout.pp], ["tp", "cp", "dp", "pp"], rank_offset=layout.first_rank
    )
    pgs = ProcessGroupCollection()
    axes = {
        "tp": "tp",
        "cp": "cp",
        "dp": "dp",
        "pp": "pp",
        "mp": ["tp", "cp", "pp"],
        "dp_cp": ["dp", "cp"],
        "tp_cp": ["tp", "cp"],
        "tp_dp_cp": ["tp", "dp", "cp"],
        # The gradient norm is computed over this group. None would mean the whole world, even if
        # the model uses only a part of the world.
        "intra_dist_opt": ["tp", "cp", "dp", "pp"],
    }
    for name, dims in axes.items():
        setattr(pgs, name, pool.group_of(grid.get_rank_enum(dims)))
    pipelines = grid.get_rank_enum("pp")
    pgs.embd = pool.group_of([sorted({ranks[0], ranks[-1]}) for ranks in pipelines])
    pgs.pos_embd = pool.group_of([ranks[:1] for ranks in pipelines])
    if layout.ep == 1:  # experts are sharded and replicated like the rest of the model
        pgs.ep = pool.group_of([[rank] for rank in layout.ranks])
        pgs.expt_tp = pgs.tp_ep = pgs.tp
        pgs.tp_ep_pp = pgs.mp
        pgs.expt_dp = pgs.dp_cp
    else:
        sizes = [layout.expert_tp, layout.ep, layout.expert_dp, layout.pp]
        experts = HyperCommGrid(sizes, ["tp", "ep", "dp", "pp"], rank_offset=layout.first_rank)
        axes = {"ep": "ep", "expt_tp": "tp", "tp_ep": ["tp", "ep"], "tp_ep_pp": ["tp", "ep", "pp"], "expt_dp": "dp"}
        for name, dims in axes.items():
            setattr(pgs, name, pool.group_of(experts.get_rank_enum(dims)))
    return ModelGroups(layout, pgs) if dist.get_rank() in layout.ranks else None


# Globals that Megatron-core still reads despite the collection argument. GQA with more TP ranks than KV groups
# gathers over the default TP group (attention.py). Other readers are layers that are built without a tp_group
# (including expert layers), the replica id of the tied embedding, and fp8.
_GLOBALS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EMBEDDING_GROUP": "embd",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    **LATER_GLOBALS,
}


@contextlib.contextmanager
def use_groups(groups: ModelGroups, platform: Platform) -> Iterator[None]:
    """Set Megatron's globals to one model's groups within this block.

    Build, run and update the model only inside it.
    """
    before = {name: getattr(parallel_state, name) for name in _GLOBALS}
    for name, attribute in _GLOBALS.items():
        setattr(parallel_state, name, getattr(groups.collection, attribute))
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    try:
        with platform.megatron_region():
            yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)


Shape = tuple[int, int, int]


class StageMessages(P2PCommunicator):
    """Send and receive hidden states of microbatches with different lengths.

    Megatron's own class sends each shape before its tensor and waits for the device to read it. But all stages run
    the same microbatches in the same order, so each stage knows the order and shapes of the messages from its two
    neighbours.
    """

    def __init__(self, groups: ModelGroups, config: TransformerConfig, microbatches: Sequence[Microbatch]):
        super().__init__(pp_group=groups.collection.pp, config=config)
        layout = groups.layout
        parts = layout.cp * (layout.tp if config.sequence_parallel else 1)
        shapes = [(m.width // parts, m.token_ids.size(0), config.hidden_size) for m in microbatches]
        chunks, last = layout.vpp or 1, layout.pp - 1
        together = config.microbatch_group_size_per_vp_stage or layout.pp
        # The model's first chunk receives no hidden states, and its last chunk receives no gradients.
        self._forward = _repeat(shapes, together, chunks - (groups.pp_rank == 0))
        self._backward = _repeat(shapes, together, chunks - (groups.pp_rank == last))

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next messages from the previous and the next stage; None: no message."""
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None


def _repeat(shapes: Sequence[Shape], together: int, times: int) -> Iterator[Shape]:
    """Yield shapes in the order of the schedule: ``together`` microbatches pass through one chunk after another."""
    for begin in range(0, len(shapes), together):
        for _ in range(times):
            yield from shapes[begin : begin + together]


class Sum(torch.autograd.Function):
    """The sum over a group whose ranks use it differently. The gradient is therefore summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class SumOfParts(torch.autograd.Function):
    """The sum over a group whose ranks all use it in the same way. Each rank keeps the gradient of its own term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
