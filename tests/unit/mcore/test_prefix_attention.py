"""Compare attention and delta nets over a prefix tree with each of its rows, in value and gradient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from rlhf_mcore.data import prefixes
from rlhf_mcore.data.prefixes import PrefixTree, build_tree
from rlhf_mcore.mcore import packed as packed_module
from rlhf_mcore.mcore.core_attention import SDPACoreAttention, with_trees
from rlhf_mcore.mcore.delta_net import CHUNK, causal_convolution, convolve_paths, delta_rule_of_paths, gated_delta_rule
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.mcore.prefix_attention import TreePart
from rlhf_mcore.parallel.context import local_places, order_of_ranks
from tests.unit.mcore.test_kernels import attention_config, varlen

P, Q = list(range(10, 21)), [30, 31, 32]
# Two nested forks, a row that ends at a fork, equal rows, a separate row, and tokens that the rank of two does not share.
ROWS = [[*P, 1, 2, 3], P + Q + [4], P + Q + [5, 6, 7, 8, 9], P, [*P, 1, 2, 3], [7, 8, 9]]


def tree_of(rows: list[list[int]], multiple: int = 1) -> PrefixTree:
    made = build_tree([np.array(row, np.int64) for row in rows], list(map(len, rows)), multiple=multiple)
    assert made is not None and len(made.token_ids) < sum(map(len, rows))
    return made


@pytest.fixture(autouse=True)
def shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST", 2)


def describe(tree: PrefixTree, rank: int = 0, cp: int = 1, device: str = "cpu") -> PackedSequences:
    """Describe a tree like ``PassInputs.packed``."""
    borders, order = torch.tensor([0, *tree.sizes]).cumsum(0).int().to(device), None
    if cp > 1:
        order = order_of_ranks(tree.sizes, cp).to(device)
    made = PackedSequences.of(borders, tree.positions.to(device), tree.sizes, order)
    part = TreePart.of(tree, rank, cp)
    placed = {name: values.to(device) for name, values in part.borders().items()}
    made.tree = TreePart(part.tree, part.pieces, part.spans, placed)
    borders.is_tree = True  # type: ignore[attr-defined]
    return made


def attend_rows(q: Tensor, k: Tensor, v: Tensor, tree: PrefixTree, window: int | None, sinks: Tensor | None) -> Tensor:
    """Attend row by row, written out: [tokens of all rows, heads * width of values]."""
    parts, scale, repeats = [], q.size(-1) ** -0.5, q.size(1) // k.size(1)
    for places in tree.sources.split(list(map(len, ROWS))):
        own_q, own_k, own_v = q[places], *(x[places].repeat_interleave(repeats, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", own_q, own_k) * scale
        distance = torch.arange(len(places))[:, None] - torch.arange(len(places))
        hidden = (distance < 0) | (distance >= (window or len(places)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(places), 1)], dim=-1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(places)], own_v))
    return torch.cat(parts).flatten(1)


def difference(
    tree: PrefixTree,
    cp: int = 1,
    *,
    kernel: Any = None,
    wide: int = 8,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> float:
    """Return the largest difference in outputs and gradients between the tree of all ranks and its rows, which are in fp32."""
    right, window = tree_of(ROWS, 2 * cp if cp > 1 else 1), changes.get("window_size")
    torch.manual_seed(0)
    inputs = [torch.randn(len(tree.token_ids), *shape).to(dtype).float() for shape in ((4, 8), (2, 8), (2, wide))]
    sinks = torch.randn(4) if changes.get("softmax_type") else None
    weights = torch.randn(sum(map(len, ROWS)), 4 * wide)
    results = []
    for whole in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        own_sinks = None if sinks is None else sinks.clone().requires_grad_()
        if whole:
            out = attend_rows(q, k, v, right, window and window[0] + 1, own_sinks)
        else:
            parts = torch.zeros(len(q), 4 * wide)
            for rank in range(cp):
                group: Any = SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank)
                core = SDPACoreAttention(
                    attention_config(params_dtype=torch.float32, **changes),
                    1,
                    AttnMaskType.causal,
                    pg_collection=SimpleNamespace(cp=group),  # type: ignore[arg-type]
                )
                core._parameters.pop("softmax_offset", None)
                vars(core).update(varlen=kernel, softmax_offset=own_sinks)
                own = local_places(tree.sizes, rank, cp) if cp > 1 else torch.arange(len(q))
                moved = (x.to(device, dtype) for x in (q[own], k, v))
                out = core(*moved, None, packed_seq_params=describe(tree, rank, cp, device))
                parts = parts.index_copy(0, own, out.float().cpu())
            out = parts[right.sources]
        (out * weights).sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad, *([] if own_sinks is None else [own_sinks.grad])])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [
        {},  # spans
        {"kernel": varlen},
        {"kernel": varlen, "window_size": (3, 0)},
        {"window_size": (3, 0)},  # pieces
        {"softmax_type": "learnable"},
        {"wide": 6},
    ],
    ids=["spans", "one kernel", "one kernel, window", "window", "sinks", "narrow values"],
)
def test_a_tree_is_its_rows(kind: dict[str, Any], cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tokens of the other ranks are known, and the gather returns all of them.
    monkeypatch.setattr("rlhf_mcore.mcore.core_attention.gather_context", lambda x, order, group, sums_gradient: x)
    tree = tree_of(ROWS, 2 * cp if cp > 1 else 1)
    assert difference(tree, cp, **kind) < 2e-5


def test_a_tree_with_wrong_parents_is_noticed() -> None:
    """Without its ancestors, or without the keys of the root, attention differs by far more than rounding."""
    lonely, rootless = tree_of(ROWS), tree_of(ROWS)
    for segment in lonely.segments:
        segment.parent, segment.end = -1, segment.begin + segment.size
    for segment in rootless.segments:
        if segment.parent < 0:
            segment.end = segment.begin + segment.size
    assert difference(lonely) > 0.1 and difference(lonely, kernel=varlen) > 0.1
    assert difference(rootless) > 0.1


def test_transformer_engines_attention_leaves_trees_to_ours() -> None:
    class Theirs(torch.nn.Module):
        def __init__(self, config: Any, layer_number: int, attn_mask_type: AttnMaskType, **kwargs: Any):
            super().__init__()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(4))

        def forward(self, query: Tensor, *others: Any, **options: Any) -> Tensor:
            assert options["packed_seq_params"].tree is None
            return query.flatten(1)

    config = attention_config(params_dtype=torch.float32, softmax_type="learnable")
    core = with_trees(Theirs)(config, layer_number=1, attn_mask_type=AttnMaskType.causal)
    assert list(core.state_dict()) == ["softmax_offset"]
    tree = tree_of(ROWS)
    q, k, v = (torch.randn(len(tree.token_ids), heads, 8) for heads in (4, 2, 2))
    plain = PackedSequences.of(torch.tensor([0, len(q)]).int(), torch.arange(len(q)), [len(q)], None)
    assert torch.equal(core(q, k, v, None, packed_seq_params=plain), q.flatten(1))
    out = core(q, k, v, None, packed_seq_params=describe(tree))
    torch.testing.assert_close(out[tree.sources], attend_rows(q, k, v, tree, None, core.softmax_offset))


def test_a_fused_rotation_begins_segments_where_their_parents_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's fused kernel for packed sequences starts all of them at position 0, without an error."""

    def rotate_fused(t: Tensor, freqs: Tensor, interleaved: bool = False) -> Tensor:
        return rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=interleaved)

    def fused_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor, interleaved: bool = False, **ranks: int) -> Tensor:
        """Rotate like Transformer Engine. Megatron-core 0.19 passes ``interleaved``, 0.16 does not."""
        pieces = t.split(cu_seqlens.diff().tolist())
        parts = [rotate_fused(piece.unsqueeze(1), freqs[: len(piece)], interleaved) for piece in pieces]
        return torch.cat(parts).squeeze(1)

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", rotate_fused)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", fused_thd)
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", lambda *args, **kwargs: pytest.fail("not fused"))
    packed_module.rotate_packed()
    config: Any = SimpleNamespace(
        apply_rope_fusion=True, mrope_section=None, rotary_interleaved=False, multi_latent_attention=False
    )
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    tree = tree_of(ROWS)
    angles = torch.outer(torch.arange(30).float(), torch.tensor([1.0, 0.3]))
    angles = torch.cat([angles, angles], dim=-1)[:, None, None]
    by_token = torch.randn(50, 2, 4)  # depends on the token id
    heads = by_token[tree.token_ids]
    found = rope_utils.apply_rotary_pos_emb(heads, angles, config, describe(tree).cu_seqlens_q, cp_group=group)
    for row, places in zip(ROWS, tree.sources.split(list(map(len, ROWS))), strict=True):
        expected = rotate_fused(by_token[row].unsqueeze(1), angles[: len(row)]).squeeze(1)
        torch.testing.assert_close(found[places], expected)
    lonely = torch.tensor([0, *tree.sizes]).cumsum(0).int()
    assert not torch.allclose(rope_utils.apply_rotary_pos_emb(heads, angles, config, lonely, cp_group=group), found)


def test_a_delta_net_goes_on_from_the_state_of_the_parent() -> None:
    """Prefixes are longer than a chunk, with several lengths at one depth."""
    long, other = [k % 40 for k in range(CHUNK + 9)], [k % 7 + 50 for k in range(2 * CHUNK + 5)]
    rows = [
        [*long, 41, 42],
        long + [43] * (CHUNK + 3),
        long + other[:5] + [44],
        long + other[:5] + [45, 46],
        [*other, 47],
        other + [48] * 70,
    ]
    tree, lengths = tree_of(rows), np.array(list(map(len, rows)))
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> Tensor:
        return torch.randn(60, 2, *shape, generator=generator, dtype=torch.float64)[tree.token_ids]

    q, k = (torch.nn.functional.normalize(tokens(6), dim=-1) for _ in range(2))
    inputs = [q, k, tokens(5), -tokens().abs(), tokens().sigmoid()]
    inputs = [(x + 0.01 * torch.randn(x.shape, generator=generator)).float() for x in inputs]  # by position too
    inputs[3] = -inputs[3].abs()
    results = []
    for whole in (True, False):
        own = [x.clone().requires_grad_() for x in inputs]
        if whole:
            out, _ = gated_delta_rule(*(x[tree.sources] for x in own), lengths=lengths)  # type: ignore[misc]
        else:
            out = delta_rule_of_paths(*own, tree=tree)[tree.sources]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(x.grad for x in own)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=2e-5, rtol=1e-4)
    x, weight = torch.randn(len(tree.token_ids), 3), torch.randn(3, 4)
    expected = causal_convolution(x[tree.sources], weight, lengths)
    torch.testing.assert_close(convolve_paths(x, weight, tree)[tree.sources], expected)
