"""Adapt Transformer Engine's linear layers to LoRA adapters, which expect the interface of Megatron's own layers.

Import this module only if Transformer Engine is installed. Its layers differ in three ways:

- A layer can include a norm. It then also returns its normed input, so the norm is computed once. The gradient of the
  norm is the sum over both products.
- The experts of a layer are one layer. Its input contains the tokens of the experts back to back.
- A layer whose communication is done elsewhere has no ``parallel_mode``.
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
WHOLE = (TELinear,)  # neither column nor row parallel: Megatron's "duplicated"


def has_outside_communication(layer: Any) -> bool:
    """Return whether a split layer leaves its communication to the token dispatcher or to shared experts."""
    return layer.parallel_mode is None


def return_normed(layer: Any) -> None:
    """Make a layer with a built-in norm always return its normed input too.

    Runs without adapters then match bit for bit.
    """
    if isinstance(layer, TELayerNormColumnParallelLinear):
        layer.return_layernorm_output = True


def parts_of(
    layer: Any, inputs: tuple[Any, ...], output: Any
) -> tuple[Tensor, Tensor, Tensor | None, list[int] | None]:
    """Return the input of a layer's product, its output, its later bias, and the tokens of each expert.

    The bias is None unless it is added later. The tokens are None if the layer has no experts.
    """
    x, (y, bias) = inputs[0], output[:2]
    if isinstance(layer, TELayerNormColumnParallelLinear):
        # Megatron returns Transformer Engine's tuple. A bias that is added later is in the middle.
        y, bias, x = output if layer.te_return_bias else (y[0], bias, y[1])
    if not isinstance(layer, (TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)):
        return x, y, bias, None
    return x, y, bias, [int(count) for count in inputs[1]]
