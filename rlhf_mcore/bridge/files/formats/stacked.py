"""Experts that files have in one tensor, with columns for outputs: Megatron's formats have each alone, with rows for outputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_mcore.bridge.map.rules import find_rule, row_runs
from rlhf_mcore.geometry import ModelGeometry


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """Describe how Megatron's formats hold one expert's part.

    ``by_halves``: all rows of the gate, then those of the linear part; Hugging Face files have them in turn.
    """

    shape: tuple[int, ...]  # [outputs, inputs], or [outputs] of a bias
    by_halves: bool

    def to_megatron(self, stored: Tensor) -> Tensor:
        """Turn [1, inputs, outputs], or [1, outputs], into Megatron's rows of outputs."""
        rows = stored[0].T if stored.dim() == 3 else stored[0]
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if self.by_halves else rows

    def to_hf(self, rows_of_outputs: Tensor) -> Tensor:
        """Turn the result of :meth:`to_megatron` back into [inputs, outputs], or [outputs]."""
        rows = (
            rows_of_outputs.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if self.by_halves else rows_of_outputs
        )
        return rows.T if rows_of_outputs.dim() == 2 else rows


def expert_form(parameter: str, geometry: ModelGeometry) -> ExpertForm | None:
    """Return the form of a parameter whose rows are no rows of Hugging Face tensors, and None for all others."""
    if find_rule(geometry, parameter)[0].kind != "stacked":
        return None
    return ExpertForm(row_runs(parameter, geometry)[1], ".linear_fc1." in parameter)
