"""Send activations between stages of a pipeline. Every stage knows their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig

from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.types import Microbatch

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
        shapes = [(m.token_ids.size(1) // parts, m.token_ids.size(0), config.hidden_size) for m in microbatches]
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
