"""Measure the exchange of rows between engines and owning ranks: four ranks, long responses, compared with another checkout.

Every rank is the first rank of an engine and has sampled a quarter of the rows. Both sides run in separate processes, in turn. The
benchmark measures the seconds of an exchange (slowest rank, median over rounds) and the growth of a rank's peak memory beyond the
trajectories. ``--against`` names the other checkout, for example a worktree of an earlier release. Without it, only this side runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GOAL, MEMORY_GOAL = 0.3, 0.35
RANKS = 4
PROMPT_TOKENS = 64


def worker(num_rows: int, tokens: int, rounds: int) -> None:
    """Run one rank under torchrun, with the code of the first checkout in PYTHONPATH."""
    import torch.distributed as dist

    from rlhf_mcore.parallel.collectives import all_gather_json
    from rlhf_mcore.trainer.batches import Rollout, SampledBatch
    from rlhf_mcore.trainer.exchange import RowExchange
    from rlhf_mcore.types import Prompt, Score

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    prompts = [Prompt(str(i), i, list(range(PROMPT_TOKENS)), "") for i in range(num_rows)]
    positions = list(range(rank, num_rows, RANKS))
    made = [_trajectory(prompts[place], tokens - PROMPT_TOKENS) for place in positions]
    rollouts = [Rollout(place, each, Score(float(place % 3))) for place, each in zip(positions, made, strict=True)]
    exchange = RowExchange(1)
    seconds = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(rounds):
        dist.barrier()
        started = time.perf_counter()
        batch, _ = exchange(SampledBatch(prompts, rollouts))
        seconds.append(time.perf_counter() - started)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    held = sum(value.nbytes for name in batch.__slots__ if hasattr(value := getattr(batch, name), "nbytes"))
    results = all_gather_json((seconds, grown * 1024, held))
    if rank == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


def _trajectory(prompt: Any, num_tokens: int) -> Any:
    ids = list(range(1, num_tokens + 1))
    logprobs = [-0.5] * num_tokens
    try:
        from rlhf_mcore.data.episodes import episode
        from rlhf_mcore.types import Completion
    except ImportError:  # a checkout from before engines returned completions
        from rlhf_mcore import types

        if hasattr(types, "Turn"):
            from rlhf_mcore.data.episodes import single_turn

            return single_turn(prompt, 0, ids, logprobs, "", "stop", 0)
        return types.Trajectory(prompt, 0, ids, logprobs, "", "stop", 0)
    import numpy as np

    arrays = np.array(ids, np.int32), np.array(logprobs, np.float32)
    return episode(prompt, 0, [Completion(0, *arrays, ((0, 0),), "stop")], "")


def measure(checkout: Path, num_rows: int, tokens: int, rounds: int) -> dict[str, float]:
    """Run four ranks with the code of a checkout."""
    arguments = [str(num_rows), str(tokens), str(rounds)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*torchrun, str(Path(__file__).resolve()), "--worker", *arguments]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=True)
    ranks = json.loads(done.stdout.splitlines()[-1])
    return {
        "seconds": statistics.median(max(rank[0][k] for rank in ranks) for k in range(rounds)),
        "grown_bytes": float(max(rank[1] for rank in ranks)),
        "held_bytes": float(max(rank[2] for rank in ranks)),
    }


def main() -> None:
    from benchmarks.common import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rows")
    parser.add_argument("--against", type=Path, help="another checkout of this project to compare with")
    args = parser.parse_args()
    num_rows, tokens, rounds, runs = (256, 256, 2, 1) if args.quick else (2048, 1024, 3, 3)
    here = Path(__file__).resolve().parents[1]
    sides = {"ours": here, **({"theirs": args.against.resolve()} if args.against is not None else {})}
    rows: list[dict[str, dict[str, float]]] = [
        {name: measure(checkout, num_rows, tokens, rounds) for name, checkout in sides.items()} for _ in range(runs)
    ]
    row_bytes = num_rows * tokens * (4 + 1 + 4)  # token ids, mask, logprobs
    found: dict[str, Any] = {"num_rows": num_rows, "tokens": tokens, "row_bytes": row_bytes, "runs": rows}
    found["held_over_a_quarter"] = max(row["ours"]["held_bytes"] for row in rows) / (row_bytes / RANKS)
    ratio = memory = float("nan")
    if args.against is not None:
        ratio = statistics.median(row["ours"]["seconds"] / row["theirs"]["seconds"] for row in rows)
        memory = statistics.median(row["ours"]["grown_bytes"] / row["theirs"]["grown_bytes"] for row in rows)
        found |= {"memory_ratio": memory, "memory_goal": MEMORY_GOAL}
    print(
        f"held {found['held_over_a_quarter']:.3f} of a quarter of the rows' bytes; peak memory {memory:.3f} of the other's"
    )
    report("exchange", found, ratio=ratio, goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*map(int, sys.argv[2:5]))
    else:
        main()
