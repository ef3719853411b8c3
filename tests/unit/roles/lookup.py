"""Models without Megatron: what they say after a token is a row of a table. The real ones are in tests/distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.data.collate import Row, make_train_batch
from rlhf_mcore.mcore.optimizer import StepOutcome
from rlhf_mcore.mcore.step import Head
from rlhf_mcore.roles import role, trained
from rlhf_mcore.types import Microbatch, TrainBatch

VOCAB = 7


@dataclass(kw_only=True)
class Layout:
    """What a role asks of a layout."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False


@dataclass
class Lookup:
    """What a role needs of a model, and functions in the place of mcore.step's and mcore.optimizer's.

    ``width`` numbers are said after each token: as many as there are tokens are logits, one is a value.
    """

    width: int = VOCAB
    layout: Layout = field(default_factory=Layout)
    dp_rank: int = 0
    tp_rank: int = 0
    is_last_stage: bool = True
    aux_loss_coef: float = 0.0
    table: Tensor = field(init=False)
    calls: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = torch.randn(VOCAB, self.width, generator=torch.Generator().manual_seed(1))
        self.table = table.requires_grad_()

    @property
    def groups(self) -> Any:
        collection = SimpleNamespace(dp=dist.group.WORLD, tp=dist.group.WORLD, intra_dist_opt=dist.group.WORLD)
        return SimpleNamespace(layout=self.layout, dp_rank=self.dp_rank, tp_rank=self.tp_rank, collection=collection)

    @property
    def spec(self) -> Any:
        return SimpleNamespace(geometry=SimpleNamespace(vocab_size=VOCAB))

    def forward(self, model: Any, parts: Sequence[Microbatch], head: Head) -> list[tuple[Tensor, ...]]:
        self.calls.append(("forward", [len(part.rows) for part in parts]))
        if not self.is_last_stage:
            return []
        with torch.no_grad():
            return [head(self.table[part.token_ids], part) for part in parts]

    def forward_backward(self, model: Any, parts: Sequence[Microbatch], loss: Callable[..., Any]) -> Any:
        self.calls.append([len(part.rows) for part in parts])
        self.table.grad = None
        found = []
        for part in parts:
            value, metrics = loss(self.table[part.token_ids], part)
            value.backward()
            found.append({"loss": value.detach().clone(), **metrics})
        return found

    def optimizer_step(self, model: Any, optimizer: Any, lr: float) -> StepOutcome:
        assert self.table.grad is not None
        self.calls.append(("step", lr))
        return StepOutcome(optimizer(self, lr), float(self.table.grad.norm()))

    def state_is_finite(self, model: Any, optimizer: Any) -> bool:
        return bool(self.table.isfinite().all())

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> Lookup:
        """Let the roles run this model, and only this."""
        monkeypatch.setattr(role, "forward", self.forward)
        for name in ("forward_backward", "optimizer_step", "state_is_finite"):
            monkeypatch.setattr(trained, name, getattr(self, name))
        return self


def stay(model: Lookup, lr: float) -> bool:
    """An optimizer that changes nothing."""
    return True


def descend(model: Lookup, lr: float) -> bool:
    """Plain gradient descent."""
    assert model.table.grad is not None
    model.table.data -= lr * model.table.grad
    return True


def batch(num_rows: int = 6, samples: int = 2) -> TrainBatch:
    """Rows of different lengths, ``samples`` to a prompt."""
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    rows = [Row(ids(1 + k % 3), ids(1 + (3 * k) % 5), [0.0] * (1 + (3 * k) % 5), 0.0) for k in range(num_rows)]
    return make_train_batch(rows, [k // samples for k in range(num_rows)], 0)


def noise(like: Tensor, seed: int) -> Tensor:
    return 0.4 * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
