"""The bytes of a sync of a model whose sizes are published, counted by hand."""

from __future__ import annotations

from pathlib import Path

from tools.what_moves import CASES, measure

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
# Llama-3-8B: vocabulary 128,256, width 4,096, 32 layers, 8 of 32 heads for keys, inner 14,336; two words' matrices.
NORMS = 32 * 2 * 4096 + 4096
LAYER = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
CUT = 32 * LAYER + 2 * 128256 * 4096


def test_a_sync_of_8b_moves_what_was_counted_by_hand() -> None:
    assert NORMS + CUT == 8_030_261_248  # as Meta states it
    beside, apart = (measure(case, MODELS) for case in CASES[:2])
    # Each of eight ranks holds the norms and half of the rest, and its engine needs all of it.
    assert beside[2:5] == [f"{8 * CUT / 1e9:,.1f}", f"{8 * CUT / 1e9:,.1f}", "0.0"]
    # Eight engines of their own on another machine: the model goes there once.
    whole = 2 * (NORMS + CUT) / 1e9
    assert apart[2:6] == [f"{8 * whole:,.1f}", f"{8 * whole:,.1f}", f"{whole:,.1f}", f"{whole:,.1f}"]
