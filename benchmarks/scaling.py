"""Measure how the control of a step scales with its rows: exchange, balance, microbatches, advantages and records, without a model.

Worlds of 1, 2 and 4 ranks process 512 rows of 64 tokens per rank (fixed work), and then 4 and 16 times as many rows. The result is the
least CPU time of a rank over some rounds, because other load changes CPU time less than wall time. The ratio is the cost per row at 16
times the rows over the cost per row at 1 times, in the world with the highest ratio. 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GOAL = 1.05
WORLDS, GROWTH = (1, 2, 4), (1, 4, 16)
TOKENS, PROMPT_TOKENS, SAMPLES, MICROBATCH_TOKENS = 64, 16, 8, 8192


def worker(rows_per_rank: int, rounds: int) -> None:
    """Run one rank under torchrun. Writes the CPU seconds of each round for each growth factor."""
    import gc

    import torch
    import torch.distributed as dist

    from rlhf_mcore.parallel.collectives import all_gather_json

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gc.freeze()  # like the ranks of a run (cli/rank.py)
    found: dict[int, list[float]] = {}
    for growth in GROWTH:
        step = _step(rows_per_rank * growth * dist.get_world_size())
        step()  # allocates memory that later rounds reuse
        for _ in range(rounds):
            gc.collect()
            dist.barrier()
            begun = time.process_time()
            step()
            found.setdefault(growth, []).append(time.process_time() - begun)
    gathered = all_gather_json([min(found[growth]) for growth in GROWTH])
    if dist.get_rank() == 0:
        print(json.dumps(gathered))
    dist.destroy_process_group()


def _step(num_rows: int) -> Any:
    """Do all the work of a step on its rows, except running models. This rank has sampled its share of the rows."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from rlhf_mcore.config.schema import AlgorithmConfig
    from rlhf_mcore.data.collate import RowTokens, make_microbatches
    from rlhf_mcore.data.episodes import episode
    from rlhf_mcore.data.packing import balance
    from rlhf_mcore.observability.run_directory import rollout_record
    from rlhf_mcore.trainer.advantages import AdvantageComputer
    from rlhf_mcore.trainer.batches import Rollout, SampledBatch
    from rlhf_mcore.trainer.exchange import RowExchange
    from rlhf_mcore.types import Completion, Prompt, Score

    rank, world = dist.get_rank(), dist.get_world_size()
    generator = np.random.default_rng(0)
    sizes = generator.integers(TOKENS // 2, TOKENS * 3 // 2, num_rows)
    prompts = [Prompt(str(i), i, list(range(PROMPT_TOKENS)), "") for i in range(num_rows // SAMPLES)]
    mine = [row for row in range(num_rows) if row // SAMPLES % world == rank]

    def make_trajectory(row: int) -> Any:
        ids, logprobs = np.arange(sizes[row], dtype=np.int32), np.full(sizes[row], -0.5, np.float32)
        return episode(prompts[row // SAMPLES], row % SAMPLES, [Completion(0, ids, logprobs, ((0, 0),), "stop")], "")

    made = [make_trajectory(row) for row in mine]
    rollouts = [Rollout(row // SAMPLES, each, Score(float(row % 3))) for row, each in zip(mine, made, strict=True)]
    exchange, advantages = RowExchange(samples_per_prompt=SAMPLES), AdvantageComputer(AlgorithmConfig())

    def step() -> None:
        batch, _ = exchange(SampledBatch(prompts, rollouts))
        batch.old_logprobs = torch.zeros(batch.token_ids.shape)
        advantages(batch)
        lengths = batch.lengths.tolist()
        balance(lengths, world)
        owned = batch.rows.tolist()
        held = RowTokens(
            owned, [lengths[row] for row in owned], {"token_ids": batch.token_ids, "loss": batch.old_logprobs}
        )
        make_microbatches(held, max_tokens=MICROBATCH_TOKENS, packing=True)
        for rollout in rollouts:
            rollout_record(rollout.trajectory, rollout.score, 1)

    return step


def main() -> None:
    from benchmarks.common import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the rows, and fewer rounds")
    args = parser.parse_args()
    rows, rounds = (64, 2) if args.quick else (512, 5)
    found: dict[str, Any] = {}
    for world in WORLDS:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--standalone"]
        command = [*torchrun, str(Path(__file__).resolve()), "--worker", str(rows), str(rounds)]
        done = subprocess.run(
            command, cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, check=True
        )
        slowest = [max(seconds) for seconds in zip(*json.loads(done.stdout.splitlines()[-1]), strict=True)]
        by_row = [seconds / (rows * growth) for seconds, growth in zip(slowest, GROWTH, strict=True)]
        found[str(world)] = {"cpu_s": slowest, "us_a_row": [1e6 * each for each in by_row]}
        print(
            f"{world} ranks: {', '.join(f'{1e6 * each:.1f}' for each in by_row)} us a row at {GROWTH} times {rows} rows a rank"
        )
    ratio = max(world["us_a_row"][-1] / world["us_a_row"][0] for world in found.values())
    weak = {name: world["us_a_row"][0] / found["1"]["us_a_row"][0] for name, world in found.items()}
    details = {
        "rows_per_rank": rows,
        "tokens": TOKENS,
        "growth": GROWTH,
        "worlds": found,
        "a_row_by_that_of_one_rank": weak,
    }
    report("scaling", details, ratio=ratio, goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        worker(*map(int, sys.argv[2:4]))
    else:
        main()
