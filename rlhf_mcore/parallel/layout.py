"""Where a rank stands in a layout: pure arithmetic, no torch.

Rank order is tensor-fastest, then context, data, pipeline (Megatron's ``tp-cp-dp-pp``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The sizes of one model's parallel axes over ``world_size`` consecutive ranks."""

    world_size: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        model = self.tp * self.pp * self.cp
        if self.world_size % model:
            raise ValueError(
                f"world size {self.world_size} is not a multiple of tp {self.tp} x pp {self.pp} x cp {self.cp} = {model}"
            )

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.world_size // (self.tp * self.pp * self.cp)

    def rank_of(self, tp: int = 0, dp: int = 0, pp: int = 0, cp: int = 0) -> int:
        """The rank at the given coordinates."""
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank: keys tp, cp, dp, pp."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
