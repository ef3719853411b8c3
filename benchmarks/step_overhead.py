"""Measure the overhead of a step: the cost of the loop, the rewards, the exchange of rows and the records of a run.

One process alternates between a step of a GRPO run and the parts of the same step alone. The parts are the engine's ``generate``
with the same requests, the update (forward and backward passes, optimizer) on the same batch, and the sync of the weights. The
learning rate is nearly zero, so that both sample responses of the same lengths.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import report, time_call
from benchmarks.one_process import loop_of
from benchmarks.vs_trl import ROWS
from rlhf_mcore.trainer.batches import ColocatedBatches
from rlhf_mcore.trainer.loop import TrainingLoop
from rlhf_mcore.trainer.reinforcement import PolicyLearner
from rlhf_mcore.types import Request, TrainBatch, UpdateResult

GOAL, WARM_UP = 1.05, 2


class KeptRequests:
    """An engine that keeps its requests."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        self.engine.submit(requests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class KeptBatch:
    """A learner that keeps its last batch."""

    def __init__(self, learner: PolicyLearner) -> None:
        self.learner = learner
        self.batch: TrainBatch | None = None

    def learn(self, step: int, batch: TrainBatch) -> tuple[Sequence[UpdateResult], Mapping[str, float]]:
        self.batch = batch
        return self.learner.learn(step, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model, few steps")
    parser.add_argument("--row", choices=ROWS, help="model and step, of vs_trl (default: large)")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    steps = WARM_UP + (2 if args.quick else args.steps)
    name = args.row or ("small" if args.quick else "large")
    rounds: list[dict[str, Any]] = []
    with loop_of(ROWS[name], steps, ["actor.optimizer.lr=1e-12"]) as loop:
        source, learner = loop.source, loop.learner
        assert isinstance(source, ColocatedBatches) and isinstance(learner, PolicyLearner)
        engine, kept = KeptRequests(source.sampler.engine), KeptBatch(learner)
        loop.source = replace(source, sampler=replace(source.sampler, engine=engine))
        loop.learner = kept
        for number in range(1, steps + 1):
            rounds.append(_round(loop, number, steps, engine, kept))
            print(rounds[-1] | ({"left out": True} if number <= WARM_UP else {}), flush=True)
    counted = rounds[WARM_UP:]
    ratios = {unit: [made["step"][unit] / made["alone"][unit] for made in counted] for unit in ("wall_s", "cpu_s")}
    medians = {unit: statistics.median(values) for unit, values in ratios.items()}
    spread = f"{min(ratios['wall_s']):.3f} to {max(ratios['wall_s']):.3f}"
    print(f"wall {medians['wall_s']:.3f} ({spread}), cpu {medians['cpu_s']:.3f}")
    details = {"row": name, "rounds": counted, "ratios": ratios, "median": medians}
    report("step_overhead", details, ratio=medians["wall_s"], goal=GOAL, quick=args.quick)


def _round(loop: TrainingLoop, step: int, num_steps: int, engine: KeptRequests, kept: KeptBatch) -> dict[str, Any]:
    """Measure a step and its parts alone."""
    engine.requests = []
    _, whole = time_call(lambda: loop.step(step, num_steps))
    batch = kept.batch
    assert batch is not None
    batch.old_logprobs = None  # the state before the update

    def alone() -> None:
        engine.engine.generate(engine.requests)
        loop.publisher.withdraw()
        kept.learner.roles.actor.deliver_update(batch)()
        loop.publisher.publish(step)

    _, parts = time_call(alone)
    return {
        "step": {"wall_s": whole.wall_s, "cpu_s": whole.cpu_s},
        "alone": {"wall_s": parts.wall_s, "cpu_s": parts.cpu_s},
        "tokens": int(batch.lengths.sum()),
    }


if __name__ == "__main__":
    main()
