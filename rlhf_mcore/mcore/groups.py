"""Process groups of one model, built from its layout and passed in from then on.

Every model has a collection of its own, so an actor and a critic with different layouts live in the same world. Megatron's
``parallel_state`` is never initialised; the few places in Megatron-core that still read its globals see this collection's groups
while :func:`rlhf_mcore.mcore.ambient.ambient` is entered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_mcore.parallel.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """A layout and its process groups, as seen from this rank."""

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


def build_groups(layout: ParallelLayout) -> ModelGroups:
    """Create the process groups of a layout. Collective: every rank of the world calls it with the same layout."""
    grid = HyperCommGrid([layout.tp, layout.cp, layout.dp, layout.pp], ["tp", "cp", "dp", "pp"])
    pgs = ProcessGroupCollection()
    for name in ("tp", "cp", "dp", "pp"):
        setattr(pgs, name, grid.create_pg(name))
    pgs.mp = grid.create_pg(["tp", "pp"]) if layout.cp == 1 else grid.create_pg(["tp", "cp", "pp"])
    pgs.dp_cp = grid.create_pg(["dp", "cp"])
    pgs.tp_cp = grid.create_pg(["tp", "cp"])
    pgs.tp_dp_cp = grid.create_pg(["tp", "dp", "cp"])
    # The norm of the gradient is taken over this group; None would mean the whole world, also for a model on a part of it.
    pgs.intra_dist_opt = grid.create_pg(["tp", "cp", "dp", "pp"])
    pipelines = grid.get_rank_enum("pp")
    pgs.embd = _group_of([sorted({ranks[0], ranks[-1]}) for ranks in pipelines])
    pgs.pos_embd = _group_of([ranks[:1] for ranks in pipelines])
    (_dense_expert_groups if layout.ep == 1 else _expert_groups)(pgs, layout)
    return ModelGroups(layout, pgs)


def _group_of(enumeration: list[list[int]]) -> dist.ProcessGroup | None:
    group, _ = dist.new_subgroups_by_enumeration(_partition(enumeration))
    return group if dist.get_rank() in {rank for ranks in enumeration for rank in ranks} else None


def _partition(enumeration: list[list[int]]) -> list[list[int]]:
    """Complete an enumeration with singletons: new_subgroups_by_enumeration gives every rank a group, or an error."""
    named = {rank for ranks in enumeration for rank in ranks}
    return enumeration + [[rank] for rank in range(dist.get_world_size()) if rank not in named]


def _dense_expert_groups(pgs: ProcessGroupCollection, layout: ParallelLayout) -> None:
    """Expert groups without expert parallelism: experts are cut and replicated as the rest of the model."""
    pgs.ep = _group_of([[rank] for rank in range(layout.world_size)])
    pgs.expt_tp = pgs.tp
    pgs.tp_ep = pgs.tp
    pgs.tp_ep_pp = pgs.mp
    pgs.expt_dp = pgs.dp_cp


def _expert_groups(pgs: ProcessGroupCollection, layout: ParallelLayout) -> None:
    grid = HyperCommGrid([layout.expert_tp, layout.ep, layout.expert_dp, layout.pp], ["tp", "ep", "dp", "pp"])
    pgs.ep = grid.create_pg("ep")
    pgs.expt_tp = grid.create_pg("tp")
    pgs.tp_ep = grid.create_pg(["tp", "ep"])
    pgs.tp_ep_pp = grid.create_pg(["tp", "ep", "pp"])
    pgs.expt_dp = grid.create_pg("dp")
