"""What the checks after a sync cost by default, by a step of the run that makes them: samples of every tensor, the canary, and the
share of a step in the digests that are made every ``bridge.digest_every`` syncs.

In one process, on CPU seconds of it: the checks are timed where a run makes them. A step has 128 responses, half of what the default
configuration asks for; the checks do not depend on their number.
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

from benchmarks.common import report, timed
from benchmarks.one_process import loop_of
from benchmarks.vs_trl import ROWS
from rlhf_mcore.bridge.run.samples import Drawn, Held
from rlhf_mcore.bridge.run.sync import PlannedBridge, _Written
from rlhf_mcore.config.schema import BridgeConfig
from rlhf_mcore.trainer.canary import Canary

GOAL, WARM_UP = 0.01, 2
ROW = replace(ROWS["large"], responses=128)  # 24.9M parameters, responses of 64 tokens
CHECKS: tuple[tuple[str, type, str], ...] = (
    ("samples", PlannedBridge, "_compare_samples"),
    ("samples", Drawn, "add"),
    ("samples", Held, "reads"),
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

    def clocked(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal depth
            depth += 1
            value, timing = timed(lambda: function(*given, **named))
            depth -= 1
            if not depth:  # one check may call another
                spent[kind] += timing.cpu_s
            return value

        return call

    rounds = []
    with ExitStack() as stack:
        for kind, owner, name in CHECKS:
            stack.enter_context(patch.object(owner, name, clocked(kind, getattr(owner, name))))
        loop = stack.enter_context(loop_of(row, steps, ["actor.optimizer.lr=1e-12"]))
        digest_s = spent["digest"] / BridgeConfig().digest_every  # of the first sync
        for number in range(1, steps + 1):
            spent.clear()
            _, whole = timed(lambda step=number: loop.step(step, steps))  # type: ignore[misc]
            spent["digest"] = digest_s
            rounds.append({"step_s": whole.cpu_s, **spent})
            print(rounds[-1], flush=True)
    counted = rounds[WARM_UP:]
    shares = {
        kind: statistics.median(made.get(kind, 0.0) / made["step_s"] for made in counted)
        for kind in ("samples", "canary", "digest")
    }
    print(", ".join(f"{kind} {share:.4f}" for kind, share in shares.items()))
    details = {"row": asdict(row), "rounds": counted, "shares": shares}
    report("sync_checks", details, ratio=sum(shares.values()), goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
