"""Process groups of one model, built from its layout and passed in from then on.

Every model has a collection of its own, so an actor and a critic with different layouts live in the same world. Megatron's
``parallel_state`` is never initialised; the few places in Megatron-core that still read its globals see this collection's groups
while :func:`rlhf_mcore.mcore.ambient.ambient` is entered.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_mcore.parallel.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """A layout and its process groups, as seen from one of its ranks."""

    layout: ParallelLayout
    collection: ProcessGroupCollection

    @property
    def tp_rank(self) -> int:
        return self.collection.tp.rank()

    @property
    def pp_rank(self) -> int:
        return self.collection.pp.rank()

    @property
    def dp_rank(self) -> int:
        return self.collection.dp.rank()

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last pipeline stage of this rank's pipeline."""
        return dist.get_process_group_ranks(self.collection.pp)[-1]


class GroupPool:
    """Process groups by the ranks that they join: axes with the same ranks share one group, also those of different models.

    A group is not free: gloo runs threads for each that wake a hundred times a second, NCCL keeps buffers. The default group of the
    process is never handed out, because Megatron's unbatched pipeline exchange relies on the pipeline's group being another one.
    ``timeout`` is how long a rank waits for the others in a collective; None: torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._known: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def group_of(self, enumeration: list[list[int]]) -> dist.ProcessGroup | None:
        """This rank's group of an enumeration of disjoint groups; None if it is in none. Collective over the world."""
        key = tuple(sorted(map(tuple, _partition(enumeration))))
        if key not in self._known:
            self._known[key], _ = dist.new_subgroups_by_enumeration(
                [list(ranks) for ranks in key], timeout=self._timeout
            )
        named = {rank for ranks in enumeration for rank in ranks}
        return self._known[key] if dist.get_rank() in named else None


def build_groups(layout: ParallelLayout, pool: GroupPool | None = None) -> ModelGroups | None:
    """The process groups of a layout, None on ranks outside of it.

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
    (_dense_expert_groups if layout.ep == 1 else _expert_groups)(pgs, layout, pool)
    return ModelGroups(layout, pgs) if dist.get_rank() in layout.ranks else None


def _partition(enumeration: list[list[int]]) -> list[list[int]]:
    """Complete an enumeration with singletons: new_subgroups_by_enumeration gives every rank a group, or an error."""
    named = {rank for ranks in enumeration for rank in ranks}
    return enumeration + [[rank] for rank in range(dist.get_world_size()) if rank not in named]


def _dense_expert_groups(pgs: ProcessGroupCollection, layout: ParallelLayout, pool: GroupPool) -> None:
    """Expert groups without expert parallelism: experts are cut and replicated as the rest of the model."""
    pgs.ep = pool.group_of([[rank] for rank in layout.ranks])
    pgs.expt_tp = pgs.tp
    pgs.tp_ep = pgs.tp
    pgs.tp_ep_pp = pgs.mp
    pgs.expt_dp = pgs.dp_cp


def _expert_groups(pgs: ProcessGroupCollection, layout: ParallelLayout, pool: GroupPool) -> None:
    grid = HyperCommGrid(
        [layout.expert_tp, layout.ep, layout.expert_dp, layout.pp],
        ["tp", "ep", "dp", "pp"],
        rank_offset=layout.first_rank,
    )
    axes = {"ep": "ep", "expt_tp": "tp", "tp_ep": ["tp", "ep"], "tp_ep_pp": ["tp", "ep", "pp"], "expt_dp": "dp"}
    for name, dims in axes.items():
        setattr(pgs, name, pool.group_of(grid.get_rank_enum(dims)))
