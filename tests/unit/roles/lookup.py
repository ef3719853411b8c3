"""Models without Megatron. Their output after a token is a row of a table. tests/distributed contains tests with real models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.mcore.model import LossSums, OutputFunction
from rlhf_mcore.mcore.optimizer import StepOutcome
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.parallel.logprobs import TokenLogprobs
from rlhf_mcore.types import Microbatch, TrainBatch
from tests.logits import given_logprobs
from tests.rows import Row, batch_of
from tests.unit.parallel.world import Meeting, ThreadGroup

VOCAB = 7


def stay(model: Lookup, lr: float) -> bool:
    """Update nothing."""
    return True


def descend(model: Lookup, lr: float) -> bool:
    """Update by plain gradient descent."""
    assert model.table.grad is not None
    model.table.data -= lr * model.table.grad
    return True


@dataclass
class Lookup:
    """The parts of a Megatron model that a role needs. The object is also its own optimizer.

    The output for a token has ``width`` numbers: logits if ``width`` is the vocabulary size, a value if it is 1. ``rule`` updates the
    table.
    """

    width: int = VOCAB
    layout: ParallelLayout = field(default_factory=lambda: ParallelLayout(1))
    dp_group: Any = None  # None: the world
    tp_rank: int = 0
    is_last_stage: bool = True
    aux_loss_coef: float = 0.0
    mtp: None = None
    indexer: str = "frozen"
    routing: None = None
    vision: None = None
    overrides: Overrides = field(default_factory=Overrides)
    rule: Callable[[Lookup, float], bool] = stay
    table: Tensor = field(init=False)
    calls: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = torch.randn(VOCAB, self.width, generator=torch.Generator().manual_seed(1))
        self.table = table.requires_grad_()

    @property
    def groups(self) -> Any:
        lone = ThreadGroup(Meeting(1), 0)
        collection = SimpleNamespace(dp=self.dp_group, intra_dist_opt=self.dp_group, tp=lone)
        return SimpleNamespace(layout=self.layout, tp_rank=self.tp_rank, cp_rank=0, collection=collection)

    @property
    def spec(self) -> Any:
        return SimpleNamespace(geometry=SimpleNamespace(vocab_size=VOCAB, vision=None, mtp_layers=0, delta=None))

    @property
    def optimizer(self) -> Lookup:
        return self

    def logprobs_and_entropy(
        self, outputs: Tensor, part: Microbatch, temperature: float, *, with_entropy: bool = True, **_: object
    ) -> TokenLogprobs:
        group: Any = ThreadGroup(Meeting(1), 0)
        labels = part.fields["labels"]
        return given_logprobs(
            outputs,
            labels,
            vocab_size=VOCAB,
            temperature=temperature,
            group=group,
            with_entropy=with_entropy,
            support=part.ragged.get("support"),
        )

    def forward(self, parts: Sequence[Microbatch], function: OutputFunction) -> list[Tensor]:
        self.calls.append(("forward", [len(part.rows) for part in parts]))
        if not self.is_last_stage:
            return []
        with torch.no_grad():
            return [function(self.table[part.token_ids], part) for part in parts]

    def updating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def adapters_off(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward_backward(self, parts: Sequence[Microbatch], loss: Callable[..., Any]) -> Any:
        self.calls.append([len(part.rows) for part in parts])
        self.table.grad = None
        found = []
        for part in parts:
            value, metrics = loss(self.table[part.token_ids], part)
            value.backward()
            found.append(LossSums(value.detach().clone(), metrics))
        return found

    def step(self, lr: float) -> StepOutcome:
        assert self.table.grad is not None
        self.calls.append(("step", lr))
        return StepOutcome(self.rule(self, lr), float(self.table.grad.norm()))

    def gather_weights(self) -> None: ...

    def is_finite(self) -> bool:
        return bool(self.table.isfinite().all())


def batch(num_rows: int = 6, samples: int = 2, owner: int | None = None) -> TrainBatch:
    """Return rows of different lengths, ``samples`` per prompt. All ranks share the rows, or ``owner`` owns all of them."""
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    rows = [Row(ids(1 + k % 3), ids(1 + (3 * k) % 5), [0.0] * (1 + (3 * k) % 5)) for k in range(num_rows)]
    return batch_of(rows, [k // samples for k in range(num_rows)], None if owner is None else [owner] * num_rows)


def before(made: TrainBatch) -> Tensor:
    """Return the previous token of each token, [N]. For the first token of a row, the value belongs to another row and is not used."""
    return made.token_ids.long().roll(1)


def noise(like: Tensor, seed: int) -> Tensor:
    return 0.4 * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
