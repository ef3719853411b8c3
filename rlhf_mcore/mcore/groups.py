"""Process groups of one model, built from its layout and passed in from then on.

Every model has a collection of its own, so an actor and a critic with different layouts live in the same world. Megatron's
``parallel_state`` is never initialised; the few places in Megatron-core that still read its globals see this collection's groups
while :func:`use_groups` is entered.

It also defines what ranks of a model exchange within a pass: messages between the stages of a pipeline, and sums over a group.
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
    """A layout and its process groups, as seen from one of its ranks."""

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
    """Process groups by the ranks that they join: axes with the same ranks share one group, also those of different models.

    A group is not free: gloo runs threads for each that wake a hundred times a second, NCCL keeps buffers. The default group of the
    process is never used, because Megatron's unbatched pipeline exchange relies on the pipeline's group being another one.
    ``timeout`` is how long a rank waits for the others in a collective; None: torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def group_of(self, enumeration: list[list[int]]) -> dist.ProcessGroup | None:
        """Return this rank's group of an enumeration of disjoint groups; None if it is in none. Collective over the world."""
        named = {rank for ranks in enumeration for rank in ranks}
        # new_subgroups_by_enumeration gives every rank of the world a group, or an error: the others get one each.
        alone = [[rank] for rank in range(dist.get_world_size()) if rank not in named]
        key = tuple(sorted(map(tuple, enumeration + alone)))
        if key not in self._groups:
            self._groups[key], _ = dist.new_subgroups_by_enumeration(
                [list(ranks) for ranks in key], timeout=self._timeout
            )
        return self._groups[key] if dist.get_rank() in named else None


def build_groups(layout: ParallelLayout, pool: GroupPool | None = None) -> ModelGroups | None:
    """Build the process groups of a layout; None on ranks outside of it.

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
        # The norm of the gradient is taken over this group; None would mean the whole world, also for a model on a part of it.
        "intra_dist_opt": ["tp", "cp", "dp", "pp"],
    }
    for name, dims in axes.items():
        setattr(pgs, name, pool.group_of(grid.get_rank_enum(dims)))
    pipelines = grid.get_rank_enum("pp")
    pgs.embd = pool.group_of([sorted({ranks[0], ranks[-1]}) for ranks in pipelines])
    pgs.pos_embd = pool.group_of([ranks[:1] for ranks in pipelines])
    if layout.ep == 1:  # experts are sharded and replicated as the rest of the model
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


# Globals that Megatron-core still reads where a collection is passed in: GQA with more TP ranks than KV groups gathers over
# the default TP group (attention.py), layers (of experts too) built without a tp_group, the tied embedding's replica id, fp8.
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
    """Set Megatron's globals to one model's groups within this block, in which that model is built, run or updated."""
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
    """Sends and receives hidden states of microbatches that differ in length.

    Megatron's own sends each shape before its tensor, and waits for the device to read it. But stages run the same microbatches in
    the same order, so messages from the stage before, and from the one behind, come in an order that is known too.
    """

    def __init__(self, groups: ModelGroups, config: TransformerConfig, microbatches: Sequence[Microbatch]):
        super().__init__(pp_group=groups.collection.pp, config=config)
        layout = groups.layout
        parts = layout.cp * (layout.tp if config.sequence_parallel else 1)
        shapes = [(m.width // parts, m.token_ids.size(0), config.hidden_size) for m in microbatches]
        chunks, last = layout.vpp or 1, layout.pp - 1
        together = config.microbatch_group_size_per_vp_stage or layout.pp
        # Nothing comes to the model's first chunk, nor back to its last one.
        self._forward = _repeat(shapes, together, chunks - (groups.pp_rank == 0))
        self._backward = _repeat(shapes, together, chunks - (groups.pp_rank == last))

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape | None, Shape | None]:
        """Return the shapes of the next messages from the stages before and behind; None: nothing is received."""
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None


def _repeat(shapes: Sequence[Shape], together: int, times: int) -> Iterator[Shape]:
    """Yield shapes in the order of the schedule: so many microbatches together go through one chunk after the other."""
    for begin in range(0, len(shapes), together):
        for _ in range(times):
            yield from shapes[begin : begin + together]


class SummedGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group. Megatron's own leaves a gradient that is not contiguous as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class Sum(torch.autograd.Function):
    """The sum over a group, of which each rank makes another use: so gradients are summed too."""

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
    """Sum over a group whose ranks all make the same use of the sum. Each takes the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
