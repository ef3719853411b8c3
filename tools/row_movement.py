"""Count the bytes of rows that a step sends from rank to rank, for GRPO with a KL reference and for PPO in several layouts.

Ranks are threads without models. They run the exchange and the learner of the trainer, and every call of ``move_rows`` is counted.
A row that stays on its rank counts nothing. The table shows bytes per token of the step, and how often ``token_ids`` leave a rank.
"""

from __future__ import annotations

import argparse
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig, OptimizerConfig, TrainerConfig
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.parallel import rows as row_transport
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles import model as role_models
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Actor, Reference
from rlhf_mcore.roles.scalar_models import Critic
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.batches import Rollout, SampledBatch
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.reinforcement import PolicyLearner, Roles
from rlhf_mcore.types import Completion, Prompt, Score
from tests.unit.parallel.world import ThreadGroup, connect_threads, run_ranks

SAMPLES, PROMPT_TOKENS, MEDIAN_TOKENS = 8, 64, 300
GRPO = AlgorithmConfig(kl=KLConfig(coef=0.05))
PPO = AlgorithmConfig(advantage="gae", kl=KLConfig(coef=0.05, placement="reward"))


@dataclass(frozen=True, slots=True)
class Setup:
    """A run: the layouts of its models, and the number of updates of a step."""

    name: str
    actor: ParallelLayout
    critic: ParallelLayout | None = None
    updates: int = 1

    @property
    def world_size(self) -> int:
        return max(layout.ranks.stop for layout in (self.actor, self.critic) if layout is not None)


SETUPS = (
    Setup("GRPO, dp 2", ParallelLayout(2)),
    Setup("GRPO, dp 2, 4 updates", ParallelLayout(2), updates=4),
    Setup("GRPO, tp 2 pp 2 dp 4", ParallelLayout(16, tp=2, pp=2)),
    Setup("GRPO, tp 2 pp 2 dp 4, 4 updates", ParallelLayout(16, tp=2, pp=2), updates=4),
    Setup("PPO, dp 2 and critic tp 2", ParallelLayout(2), ParallelLayout(2, tp=2)),
    Setup("PPO, dp 2 and critic dp 2, 4 updates", ParallelLayout(2), ParallelLayout(2), 4),
    Setup("PPO, dp 2 and critic tp 2, 4 updates", ParallelLayout(2), ParallelLayout(2, tp=2), 4),
    Setup(
        "PPO, dp 4 and critic tp 2 dp 2 apart, 4 updates", ParallelLayout(4), ParallelLayout(4, tp=2, first_rank=4), 4
    ),
)


@dataclass(slots=True)
class Counter:
    """Bytes that leave a rank, by phase and field, and the calls that send ``token_ids``. It replaces the run's record."""

    sent: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    token_sends: int = 0
    _phase: Any = field(default_factory=threading.local)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase.name = name
        yield

    def move_rows(
        self,
        fields: Mapping[str, Tensor],
        lengths: row_transport.Rows,
        holders: row_transport.Rows,
        wanted: Sequence[row_transport.Rows],
        group: Any = None,
    ) -> dict[str, Tensor]:
        """Count a call on the first rank, and run it. Replaces outputs of models by zeros."""
        rank = dist.get_rank(group)
        held = int(lengths[holders == rank].sum())
        given = {
            name: values if len(values) == held else values.new_zeros(held, *values.shape[1:])
            for name, values in fields.items()
        }
        if rank == 0:
            tokens = sum(int(lengths[rows[holders[rows] != other]].sum()) for other, rows in enumerate(wanted))
            for name, values in given.items():
                self.sent[self._phase.name, name] += tokens * values[:0].new_empty(1, *values.shape[1:]).nbytes
            self.token_sends += "token_ids" in given and tokens > 0
        return _move_rows(given, lengths, holders, wanted, group)


_move_rows = row_transport.move_rows


def count_step(setup: Setup, num_prompts: int) -> tuple[Counter, int]:
    """Run one step. Returns the counter, and the number of tokens of the step."""
    counter = Counter()
    sizes = (
        np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), 0.8, num_prompts * SAMPLES).astype(int).clip(8, 4096)
    )
    with pytest.MonkeyPatch.context() as patch:
        connect_threads(patch)
        for module in (row_transport, role_models):
            patch.setattr(module, "move_rows", counter.move_rows)
        run_ranks(setup.world_size, lambda group: _run_step(setup, group, sizes, counter))
    return counter, int(sizes.sum()) + len(sizes) * PROMPT_TOKENS


def _run_step(setup: Setup, group: ThreadGroup, sizes: Any, counter: Counter) -> None:
    prompts = [Prompt(str(i), i, list(range(PROMPT_TOKENS)), "") for i in range(len(sizes) // SAMPLES)]

    def rollout(row: int) -> Rollout:
        ids, logprobs = np.arange(sizes[row], dtype=np.int32), np.full(sizes[row], -0.5, np.float32)
        place, sample = divmod(row, SAMPLES)
        sampled = episode(prompts[place], sample, [Completion(0, ids, logprobs, ((0, 0),), "stop")], "")
        return Rollout(place, sampled, Score(float(row % 3)))

    cfg = GRPO if setup.critic is None else PPO
    plan = MinibatchPlan(len(prompts) // setup.updates)

    def build_model(layout: ParallelLayout, name: str) -> TrainedModel:
        none: Any = None
        return TrainedModel(layout, None, none, TrainerConfig(), optimizer=OptimizerConfig(), plan=plan, name=name)

    actor = Actor(build_model(setup.actor, "actor"), 1.0, cfg)
    reference = Reference(RoleModel(setup.actor, None, actor.model.spec, TrainerConfig()), 1.0)
    critic = None if setup.critic is None else Critic(build_model(setup.critic, "critic"), 0.2)
    recorder: Any = counter
    learner = PolicyLearner(Roles(actor, critic, reference), AdvantageComputer(cfg), recorder)
    # Each data-parallel rank of the actor has sampled its share of the prompts.
    leads = [setup.actor.rank_of(dp=replica) for replica in range(setup.actor.dp)]
    mine = [row for row in range(len(sizes)) if leads[row // SAMPLES % len(leads)] == group.rank()]
    with counter.phase("exchange"):
        batch, _ = RowExchange(SAMPLES, choose_owners=actor.model.choose_owners)(
            SampledBatch(prompts, [rollout(row) for row in mine])
        )
    learner.learn(1, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--fields", action="store_true", help="also print bytes per token by phase and field")
    args = parser.parse_args()
    phases = ("exchange", "reference", "values", "old_logprobs", "update")
    print(f"| run | {' | '.join(phases)} | all | sends of token_ids |")
    print("|---" * (len(phases) + 3) + "|")
    for setup in SETUPS:
        counter, tokens = count_step(setup, args.prompts)
        by_phase = {phase: sum(v for (p, _), v in counter.sent.items() if p == phase) / tokens for phase in phases}
        cells = [f"{by_phase[phase]:.2f}" for phase in phases]
        print(f"| {setup.name} | {' | '.join(cells)} | {sum(by_phase.values()):.2f} | {counter.token_sends} |")
        if args.fields:
            for (phase, name), sent in sorted(counter.sent.items()):
                print(f"    {phase} {name}: {sent / tokens:.2f}")


if __name__ == "__main__":
    main()
