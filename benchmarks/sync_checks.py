"""Measure the cost of the checks after a sync, as a share of a step: digests of every tensor, and the canary.

One process counts its CPU seconds in the checks of a run. A step has 256 responses, as in the default configuration. The cost of the
checks does not depend on this number. The goal applies to the digests.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

from benchmarks.common import report, time_call
from benchmarks.one_process import loop_of
from benchmarks.vs_trl import ROWS
from rlhf_mcore.bridge.run.sync import PlannedBridge, _Written
from rlhf_mcore.trainer.publishers import Canary

GOAL, WARM_UP = 0.01, 2
ROW = replace(ROWS["large"], responses=256)  # 24.9M parameters, responses of 64 tokens
CHECKS: tuple[tuple[str, type, str], ...] = (
    ("digest", PlannedBridge, "_source_digests"),
    ("digest", _Written, "add"),
    ("digest", _Written, "digests"),
    ("canary", Canary, "draw"),
    ("canary", Canary, "score"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few steps")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    steps, spent, depth = WARM_UP + (2 if args.quick else args.steps), defaultdict[str, float](float), 0
    row = ROWS["small"] if args.quick else ROW

    def time_calls(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal depth
            depth += 1
            value, timing = time_call(lambda: function(*given, **named))
            depth -= 1
            if not depth:  # a check may call another check
                spent[kind] += timing.cpu_s
            return value

        return call

    rounds = []
    with ExitStack() as stack:
        for kind, owner, name in CHECKS:
            stack.enter_context(patch.object(owner, name, time_calls(kind, getattr(owner, name))))
        loop = stack.enter_context(loop_of(row, steps, ["actor.optimizer.lr=1e-12"]))
        for number in range(1, steps + 1):
            spent.clear()
            _, whole = time_call(lambda step=number: loop.step(step, steps))  # type: ignore[misc]
            rounds.append({"step_s": whole.cpu_s, **spent})
            print(rounds[-1], flush=True)
    counted = rounds[WARM_UP:]
    shares = {
        kind: statistics.median(made.get(kind, 0.0) / made["step_s"] for made in counted)
        for kind in ("digest", "canary")
    }
    print(", ".join(f"{kind} {share:.4f}" for kind, share in shares.items()))
    details = {"row": asdict(row), "rounds": counted, "shares": shares}
    report("sync_checks", details, ratio=shares["digest"], goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
