"""Prefix trees on a GPU: torch's kernel of packed sequences, and Transformer Engine's fused rotation. Skipped without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from rlhf_mcore.data import prefixes
from rlhf_mcore.mcore.packed import rotate_packed
from tests.unit.mcore.test_prefix_attention import ROWS, describe, difference, tree_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST", 2)


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("window", [{}, {"window_size": (3, 0)}], ids=["all", "window"])
def test_one_kernel_in_bf16_is_each_row_in_fp32(
    window: dict[str, Any], cp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention.varlen import varlen_attn

    monkeypatch.setattr("rlhf_mcore.mcore.core_attention.gather_context", lambda x, order, group, sums_gradient: x)
    tree = tree_of(ROWS, 2 * cp if cp > 1 else 1)
    found = difference(tree, cp, kernel=varlen_attn, device="cuda", dtype=torch.bfloat16, **window)
    assert found < 0.08  # the same sums in bf16 on a CPU: 0.04


def test_a_fused_rotation_begins_segments_where_their_parents_end() -> None:
    pytest.importorskip("transformer_engine")
    rotate_packed()
    tree = tree_of(ROWS)
    config: Any = SimpleNamespace(
        apply_rope_fusion=True, mrope_section=None, rotary_interleaved=False, multi_latent_attention=False
    )
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    angles = torch.outer(torch.arange(30).float(), torch.tensor([1.0, 0.3, 0.1, 0.03]))
    angles = torch.cat([angles, angles], dim=-1)[:, None, None].cuda()
    by_token = torch.randn(50, 2, 8).cuda()
    borders = describe(tree, device="cuda").cu_seqlens_q
    found = rope_utils.apply_rotary_pos_emb(by_token[tree.token_ids.cuda()], angles, config, borders, cp_group=group)
    for row, places in zip(ROWS, tree.sources.split(list(map(len, ROWS))), strict=True):
        expected = rope_utils._apply_rotary_pos_emb_bshd(
            by_token[row].unsqueeze(1), angles[: len(row)], rotary_interleaved=False
        )
        torch.testing.assert_close(found[places.cuda()], expected.squeeze(1), atol=1e-5, rtol=1e-5)
