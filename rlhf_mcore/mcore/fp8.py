"""Products of 8 bits in Transformer Engine's layers: what they keep beside the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def copies_of_pass(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Let go of the weights of 8 bits that a pass has made, at the end of this block.

    Layers make them of their weights in the first microbatch of a pass, for all of it (``is_first_microbatch``), and would keep one
    or two bytes a parameter until the next: while weights are offloaded, and beside an engine.
    """
    yield
    for chunk in chunks:
        for module in chunk.modules():
            if (kept := getattr(module, "_fp8_workspaces", None)) is not None:
                kept.clear()
