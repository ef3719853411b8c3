"""Give Transformer Engine's linear layers what adapters need of Megatron's own. Imported where it is installed.

Three things differ. A norm can be a part of a layer: the layer then returns its normed input too. So the norm is computed once, and
its gradient is the sum of both products'. The experts of a layer are one layer: its input has their tokens one
after the other. And a layer that leaves communication to others has no ``parallel_mode``.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from torch import Tensor

COLUMN = (TEColumnParallelLinear, TELayerNormColumnParallelLinear, TEColumnParallelGroupedLinear)
ROW = (TERowParallelLinear, TERowParallelGroupedLinear)
WHOLE = (TELinear,)  # what is neither of them: Megatron's "duplicated"


def has_outside_communication(layer: Any) -> bool:
    """Tell whether a layer that ranks split leaves communication to the dispatcher of tokens, or to shared experts."""
    return layer.parallel_mode is None


def return_normed(layer: Any) -> None:
    """Let a layer with a norm in front return the normed input too, always: without adapters it then computes the same bit for bit."""
    if isinstance(layer, TELayerNormColumnParallelLinear):
        layer.return_layernorm_output = True


def parts_of(
    layer: Any, inputs: tuple[Any, ...], output: Any
) -> tuple[Tensor, Tensor, Tensor | None, list[int] | None]:
    """Return the input of a layer's product, its output, and its bias if that is added later.

    The fourth are the tokens of each expert, None where the layer has no experts.
    """
    x, (y, bias) = inputs[0], output[:2]
    if isinstance(layer, TELayerNormColumnParallelLinear):
        # Megatron passes on what Transformer Engine returns: a bias that is added later is between the two.
        y, bias, x = output if layer.te_return_bias else (y[0], bias, y[1])
    if not isinstance(layer, (TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)):
        return x, y, bias, None
    return x, y, bias, [int(count) for count in inputs[1]]
