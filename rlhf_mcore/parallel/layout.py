"""Compute a rank's coordinates in a layout. Pure arithmetic, without torch.

Rank order is tensor-fastest, then context, data, pipeline (Megatron's ``tp-cp-dp-pp``). The experts of an MoE model
are sharded by a separate grid over the same ranks of a pipeline stage: expert tensor, expert, data.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mcore.config.questions import token_multiple
from rlhf_mcore.config.schema import LayoutConfig
from rlhf_mcore.geometry import Shard


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The sizes of one model's parallel axes over ``world_size`` consecutive ranks, starting at ``first_rank``."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    etp: int | None = None  # tensor-parallel size of an expert; None: equal to tp
    # Number of layers of every stage, chunk after chunk in network order. None: equal stages.
    layers_per_stage: tuple[int, ...] | None = None
    first_rank: int = 0

    def __post_init__(self) -> None:
        model = self.tp * self.pp * self.cp
        if self.world_size % model:
            raise ValueError(
                f"world size {self.world_size} is not a multiple of tp {self.tp} x pp {self.pp} x cp {self.cp} = {model}"
            )
        if self.ep == 1 and self.expert_tp != self.tp:
            # Otherwise Megatron reduces the experts' gradients over the wrong ranks.
            raise ValueError(f"etp {self.etp} must equal tp {self.tp} if ep is 1")
        per_stage = self.world_size // self.pp
        if per_stage % (self.expert_tp * self.ep):
            raise ValueError(f"{per_stage} ranks of a stage are not a multiple of etp {self.expert_tp} x ep {self.ep}")
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.num_stages:
            raise ValueError(f"layers_per_stage {self.layers_per_stage} must contain {self.num_stages} stages")

    @classmethod
    def of(cls, cfg: LayoutConfig, ranks: list[int] | None, world_size: int) -> ParallelLayout:
        """Build a layout over ``ranks`` = [first, end); None: over all ranks of the world.

        Raises:
            ValueError: its axes do not divide the number of ranks.
        """
        first, end = ranks or (0, world_size)
        return cls(
            end - first,
            cfg.tp,
            cfg.pp,
            cfg.vpp,
            cfg.cp,
            cfg.sequence_parallel,
            cfg.ep,
            cfg.etp,
            None if cfg.layers_per_stage is None else tuple(cfg.layers_per_stage),
            first,
        )

    @property
    def ranks(self) -> range:
        """The global ranks that hold a part of the model."""
        return range(self.first_rank, self.first_rank + self.world_size)

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def sequence_multiple(self) -> int:
        """The divisor of every padded sequence length: two chunks per context-parallel rank."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def token_multiple(self) -> int:
        """The divisor of a microbatch's token count, because context and sequence parallelism split it equally."""
        return token_multiple(self.tp, self.cp, self.sequence_parallel)

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages, counting every model chunk of an interleaved pipeline."""
        return self.pp * (self.vpp or 1)

    def layers_of(self, num_layers: int, pp: int, chunk: int = 0) -> range:
        """Return the layer numbers of one chunk of a pipeline rank.

        Raises:
            ValueError: the layers do not divide equally and ``layers_per_stage`` is not set, or its sum is wrong.
        """
        sizes = self.layers_per_stage or (num_layers // self.num_stages,) * self.num_stages
        if sum(sizes) != num_layers:
            raise ValueError(f"layers_per_stage {sizes} of {self.num_stages} stages must add up to {num_layers} layers")
        stage = chunk * self.pp + pp
        return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel size of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """The number of ranks that hold the same part of the same expert."""
        return self.world_size // (self.pp * self.expert_tp * self.ep)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of each data-parallel replica."""
        ranks: list[list[int]] = [[] for _ in range(self.dp)]
        for rank in self.ranks:
            ranks[self.coordinates(rank)["dp"]].append(rank)
        return tuple(map(tuple, ranks))

    def rank_of(self, tp: int = 0, dp: int = 0, pp: int = 0, cp: int = 0) -> int:
        """Return the global rank at the given coordinates."""
        return self.first_rank + ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank: keys tp, cp, dp, pp."""
        rank, tp = divmod(rank - self.first_rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return {"tp": tp, "cp": cp, "dp": dp, "pp": pp}

    def expert_coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a global rank in the grid of the experts: keys etp, ep, edp, pp."""
        rank, etp = divmod(rank - self.first_rank, self.expert_tp)
        rank, ep = divmod(rank, self.ep)
        pp, edp = divmod(rank, self.expert_dp)
        return {"etp": etp, "ep": ep, "edp": edp, "pp": pp}

    def shard_of(self, name: str, rank: int) -> Shard:
        """Return the shard of the Megatron parameter ``name`` that a rank holds."""
        if is_expert(name):
            place = self.expert_coordinates(rank)
            return Shard(place["etp"], self.expert_tp, place["ep"], self.ep)
        return Shard(self.coordinates(rank)["tp"], self.tp)


def is_expert(name: str) -> bool:
    """Return whether a Megatron parameter belongs to one expert (a router does not)."""
    return ".mlp.experts." in name
