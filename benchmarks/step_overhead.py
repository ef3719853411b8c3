"""A step of reinforcement learning by the same work done by its parts alone: what the loop, rewards, the exchange of rows and the
record of a run cost beside them.

In one process, in turns: a step of a GRPO run, and then of the same step the engine's ``generate`` with the requests that it had, the
update (forward and backward passes, optimizer) on the batch that it had, and the sync of the weights. The learning rate is next to
nothing, so that both draw responses of the same lengths.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from benchmarks.common import report, timed
from benchmarks.one_process import trainer_of
from benchmarks.vs_trl import ROWS

GOAL, WARM_UP = 1.05, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--row", choices=ROWS, default="large", help="model and step, of vs_trl")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    steps = WARM_UP + (3 if args.quick else args.steps)
    rounds: list[dict[str, Any]] = []
    with trainer_of(ROWS[args.row], steps, ["actor.optimizer.lr=1e-12"]) as trainer:
        for number in range(steps):
            rounds.append(_round(trainer))
            print(rounds[-1] | ({"left out": True} if number < WARM_UP else {}), flush=True)
    kept = rounds[WARM_UP:]
    medians = {
        unit: statistics.median(made["step"][unit] / made["alone"][unit] for made in kept)
        for unit in ("wall_s", "cpu_s")
    }
    print(f"wall {medians['wall_s']:.3f}, cpu {medians['cpu_s']:.3f}")
    details = {"row": args.row, "rounds": kept, "median": medians}
    report("step_overhead", details, ratio=medians["wall_s"], goal=GOAL, quick=args.quick)


def _round(trainer: Any) -> dict[str, Any]:
    """A step, and its parts alone."""
    inner = trainer._run.trainer
    worker, roles = inner.source.worker, inner.learner.roles
    asked: list[Any] = []
    batches: list[Any] = []
    engine, learn = type(worker.generator), type(inner.learner).learn

    def submit(self: Any, requests: Any, own: Callable[..., None] = engine.submit) -> None:
        asked.extend(requests)
        own(self, requests)

    def keep(self: Any, step: int, batch: Any) -> Any:
        batches.append(batch)
        return learn(self, step, batch)

    with patch.object(engine, "submit", submit), patch.object(type(inner.learner), "learn", keep):
        _, step = timed(trainer.step)
    [batch] = batches
    batch.old_logprobs = None  # as it was before the update

    def alone() -> None:
        worker.generator.generate(asked)
        inner.publisher.withdraw()
        roles.actor.deliver_update(batch)()
        inner.publisher.publish(trainer._next - 1)

    _, all_parts = timed(alone)
    return {
        "step": {"wall_s": step.wall_s, "cpu_s": step.cpu_s},
        "alone": {"wall_s": all_parts.wall_s, "cpu_s": all_parts.cpu_s},
        "tokens": int(batch.lengths.sum()),
    }


if __name__ == "__main__":
    main()
