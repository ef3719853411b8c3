"""Measure the benefit of shared prefixes: an update and an old-logprob pass that compute a prompt per response or only once.

One prompt of P tokens has n responses of R tokens each. One process runs both sides in turn, on a model of two layers with random
weights. The goal for the first three shapes is a speedup of 0.85 of the ratio of FLOPs. For long responses it is a speedup of 1.0. If
nothing is shared, the microbatches are the same and the goal is 0.97. The ratio is the smallest quotient of measured value and goal.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import report, time_call
from benchmarks.packing import actor
from benchmarks.synthetic import world_of_one
from benchmarks.vs_trl import Row, make

GOAL = 1.0
MODEL = Row(vocab=512, hidden=256, layers=2, heads=8, ffn=768, responses=0, tokens=0, goal=0.0)
# P, R, n and the goal for speedup / ratio of FLOPs, or for the speedup if that quotient says little.
SHAPES = (
    (64, 64, 8, 0.85, True),
    (512, 64, 8, 0.85, True),
    (1024, 128, 8, 0.85, True),
    (256, 1024, 8, 1.0, False),
    (0, 256, 8, 0.97, False),
)


def batch(prompt: int, response: int, n: int) -> Any:
    """Return responses to one prompt, or rows that share nothing if the prompt is empty."""
    from rlhf_mcore.data.prefixes import computed_of_row
    from rlhf_mcore.types import TrainBatch

    draw = torch.Generator().manual_seed(0)
    shared = torch.randint(3, MODEL.vocab, (prompt,), generator=draw)
    rows = [torch.cat([shared, torch.randint(3, MODEL.vocab, (response,), generator=draw)]) for _ in range(n)]
    length = prompt + response
    mask = (torch.arange(length) >= max(prompt, 1)).repeat(n)
    ids = torch.cat(rows).int()
    return TrainBatch(
        lengths=torch.full((n,), length),
        num_sampled=torch.full((n,), length - max(prompt, 1)),
        scores=torch.zeros(n, dtype=torch.float64),
        truncated=torch.zeros(n, dtype=torch.bool),
        group_ids=torch.zeros(n, dtype=torch.int64),
        owners=torch.zeros(n, dtype=torch.int64),
        rows=torch.arange(n),
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=torch.zeros(len(ids)),
        computed=torch.tensor([computed_of_row(row.numpy(), mask[:length].numpy()) for row in rows]),
        advantages=mask.float(),
        with_entropy=False,
    )


def flops_ratio(which: Any, prompt: int, response: int, n: int) -> float:
    """Return the operations with n prompts divided by the operations with one shared prompt."""
    import numpy as np

    from rlhf_mcore.planning.counts import model_flops

    flops, length = model_flops(which.model.spec.geometry), prompt + response
    attention = n * float(flops.attention(np.float64(length)))
    logits = flops.logits * n * response
    spared = (n - 1) * float(flops.attention(np.float64(prompt)))
    plain = flops.token * n * length + attention + logits
    return plain / (flops.token * (prompt + n * response) + attention - spared + logits)


def measure(which: Any, shape: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Return the speedups in CPU seconds and the pairs of timings."""

    held, trainer, speedups = batch(*shape), which.model.trainer, {}
    works = {"update": lambda: which.deliver_update(held)(), "old logprobs": lambda: which.compute_logprobs(held)}
    for name, work in works.items():
        pairs = []
        for number in range(rounds + 1):
            pair = {}
            for shares in (True, False) if number % 2 else (False, True):
                which.model.trainer = trainer.model_copy(update={"share_prefixes": shares})
                pair[shares] = time_call(work)[1].cpu_s
            if number:  # the first round is a warm-up
                pairs.append(pair[False] / pair[True])
        speedups[name] = {"pairs": pairs, "median": statistics.median(pairs)}
    which.model.trainer = trainer
    return speedups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, without the longest responses")
    quick = parser.parse_args().quick
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows, scores = [], []
    with world_of_one() as folder:
        make(Path(folder), MODEL)
        which = actor(folder / "model", 1)
        which.model.trainer.max_tokens_per_microbatch = 16384
        for prompt, response, n, goal, by_flops in SHAPES:
            if quick and response > 1000:
                continue
            expected = flops_ratio(which, prompt, response, n)
            speedups = measure(which, (prompt, response, n), 2 if quick else 5)
            rows.append({"shape": [prompt, response, n], "flops": expected, "goal": goal, "speedups": speedups})
            for name, found in speedups.items():
                value = found["median"] / (expected if by_flops else 1.0)
                scores.append(value / goal)
                print(
                    f"P {prompt}, R {response}, n {n}, {name}: {found['median']:.2f} times as fast, FLOPs {expected:.2f}"
                )
    report("prefixes", {"shapes": rows}, ratio=min(scores), goal=GOAL, quick=quick)


if __name__ == "__main__":
    main()
