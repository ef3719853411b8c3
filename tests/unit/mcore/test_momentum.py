"""Check that matrices in parts on several ranks are orthogonalised whole, each by one of these ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rlhf_mcore.mcore import momentum
from rlhf_mcore.mcore.momentum import MatrixExchange, MatrixPart, MomentumSteps, MuonRange, orthogonalize, update_scale
from tests.unit.parallel.world import ThreadGroup, rank_threads, run_ranks

__all__ = ["rank_threads"]

SHAPES = {"wide": (4, 10), "tall": (9, 3), "other": (5, 5)}
# For every rank, its flat ranges, each with consecutive parts (matrix, first row and column, rows and columns).
HELD = [
    [[("wide", (0, 0), (2, 10)), ("tall", (0, 0), (1, 3))], [("other", (0, 0), (5, 2))]],
    [[("wide", (2, 0), (2, 4))], [("other", (0, 2), (5, 3)), ("tall", (1, 0), (8, 3))]],
    [[("wide", (2, 4), (2, 6))]],
    [],
]


def view(offset: int, extent: tuple[int, int], flat: Tensor) -> Tensor:
    return flat[offset : offset + extent[0] * extent[1]].view(extent)


def parts_of(described: list[tuple[str, tuple[int, int], tuple[int, int]]]) -> list[MatrixPart]:
    found, offset = [], 0
    for name, start, extent in described:
        found.append(MatrixPart(name, SHAPES[name], start, extent, partial(view, offset, extent)))
        offset += extent[0] * extent[1]
    return found


def join_parts(matrices: dict[str, Tensor], parts: list[MatrixPart]) -> Tensor:
    """Return the flat range that contains these parts."""
    pieces = [matrices[p.name][p.start[0] :, p.start[1] :][: p.extent[0], : p.extent[1]] for p in parts]
    return torch.cat([piece.reshape(-1) for piece in pieces])


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [1, 1 << 26])
def test_every_rank_gets_its_parts_of_whole_matrices(
    dtype: torch.dtype, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(momentum, "_BUCKET", bucket)
    torch.manual_seed(0)
    before = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    after = {
        name: (orthogonalize(matrix.to(dtype)) * update_scale(*matrix.shape)).float() for name, matrix in before.items()
    }

    def rank(group: ThreadGroup) -> None:
        held = [parts_of(described) for described in HELD[group.rank()]]
        flats = [join_parts(before, parts) for parts in held]
        stepped = [MuonRange(flat, {}, {}, parts) for flat, parts in zip(flats, held, strict=True)]
        MatrixExchange(stepped, group, dtype, torch.device("cpu"))(flats)  # type: ignore[arg-type]
        for flat, parts in zip(flats, held, strict=True):
            assert torch.equal(flat, join_parts(after, parts))

    run_ranks(len(HELD), rank)


def test_sgd_adds_up_what_it_has_seen() -> None:
    weight = torch.tensor([1.0, 2.0])
    one = MuonRange(weight, state := {}, {"lr": 0.1, "weight_decay": 0.5}, [])
    steps = MomentumSteps([one], 0.5, None)
    for gradient in ([4.0, 0.0], [1.0, 2.0]):
        weight.grad = torch.tensor(gradient)
        steps.step()
        assert weight.grad is None
    # 1 * 0.95 - 0.4 = 0.55, then 0.55 * 0.95 - 0.1 * (2 + 1); 2 * 0.95 = 1.9, then 1.9 * 0.95 - 0.1 * 2
    torch.testing.assert_close(weight, torch.tensor([0.2225, 1.605]))
    assert state["momentum"].tolist() == [3.0, 2.0] and int(state["step"]) == 2
