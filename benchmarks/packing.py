"""Measure the benefit of packing: useful tokens per second of an update, packed over padded, times the padded fill.

A packed microbatch has no padding, so its ideal speedup is 1 / fill of the padded one. Then the ratio is 1. Costs of packing
lower it, for example attention sequence by sequence if there is no fused kernel. One process trains a model of 10M parameters
with random weights and nearly lognormal lengths. Both sides run in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import report, time_call
from benchmarks.synthetic import world_of_one
from benchmarks.vs_trl import Row, make

GOAL = 0.90
MODEL = Row(vocab=2048, hidden=256, layers=6, heads=8, ffn=1024, responses=0, tokens=0, goal=0.0)
BUDGET, ROWS = 4096, 64


def actor(path: Path, num_rows: int) -> Any:
    """Build the model with its optimizer, as in a run."""
    from rlhf_mcore.bridge.files.hf_files import HFReader, load
    from rlhf_mcore.config.schema import AlgorithmConfig, OptimizerConfig, RecomputeConfig, TrainerConfig
    from rlhf_mcore.mcore.build import BuildOptions, build_model
    from rlhf_mcore.mcore.groups import GroupPool, build_groups
    from rlhf_mcore.mcore.model_spec import load_spec
    from rlhf_mcore.parallel.layout import ParallelLayout
    from rlhf_mcore.platform import current_platform
    from rlhf_mcore.roles.policy import Actor
    from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel

    platform, spec, layout = current_platform(), load_spec(path), ParallelLayout(1)
    groups = build_groups(layout, GroupPool())
    assert groups is not None
    options = BuildOptions(platform.default_dtype, "auto", RecomputeConfig(), True, False, 0)
    model = build_model(spec, groups, platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    optimizer = OptimizerConfig(lr=1e-6)
    model.add_optimizer(optimizer)
    trainer, plan = TrainerConfig(max_tokens_per_microbatch=BUDGET), MinibatchPlan(num_rows)
    trained = TrainedModel(layout, model, spec, trainer, optimizer=optimizer, plan=plan, name="actor")
    return Actor(trained, 1.0, AlgorithmConfig())


def batch(lengths: list[int]) -> Any:
    """Return a batch with prompts of 16 tokens, responses and advantages."""
    from rlhf_mcore.types import TrainBatch

    sizes = torch.tensor(lengths)
    total, rows = int(sizes.sum()), len(lengths)
    mask = torch.ones(total, dtype=torch.bool)
    for start in (sizes.cumsum(0) - sizes).tolist():
        mask[start : start + 16] = False
    return TrainBatch(
        lengths=sizes,
        num_sampled=sizes - 16,
        scores=torch.zeros(rows, dtype=torch.float64),
        truncated=torch.zeros(rows, dtype=torch.bool),
        group_ids=torch.arange(rows) // 8,
        owners=torch.zeros(rows, dtype=torch.int64),
        rows=torch.arange(rows),
        token_ids=torch.randint(3, MODEL.vocab, (total,), generator=torch.Generator().manual_seed(0)).int(),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(total),
        advantages=mask.float(),
        with_entropy=False,
    )


def padded_fill(which: Any, held: Any) -> float:
    """Return the share of tokens in padded microbatches that are not padding."""
    [tokens] = which.model.deliver(held, [which.model.deal(held)], {})
    made = which.model.microbatches(tokens)
    return float(held.lengths.sum()) / sum(part.token_ids.numel() for part in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the rows, fewer rounds")
    quick = parser.parse_args().quick
    rounds, num_rows = (2, ROWS // 4) if quick else (7, ROWS)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    draw = np.random.Generator(np.random.Philox(key=3))
    lengths = np.clip(draw.lognormal(np.log(160), 0.8, num_rows), 18, 1000).astype(int).tolist()
    with world_of_one() as folder:
        make(folder, MODEL)
        which, held, pairs = actor(folder / "model", num_rows), batch(lengths), []
        which.model.trainer.packing = False
        fill = padded_fill(which, held)
        for number in range(rounds + 1):
            pair = {}
            for name in ("packed", "padded"):
                which.model.trainer.packing = name == "packed"
                _, took = time_call(which.deliver_update(held))
                pair[name] = {"wall_s": took.wall_s, "cpu_s": took.cpu_s}
            if number:  # the first round is a warm-up
                pairs.append(pair)
    ratios = {
        unit: [pair["padded"][unit] / pair["packed"][unit] * fill for pair in pairs] for unit in ("wall_s", "cpu_s")
    }
    medians = {unit: statistics.median(values) for unit, values in ratios.items()}
    print(f"padded fill {fill:.3f}; wall {medians['wall_s']:.3f}, cpu {medians['cpu_s']:.3f}")
    measured = {"pairs": pairs, "fill": fill, "tokens": sum(lengths), "ratios": ratios, "median": medians}
    report("packing", measured, ratio=medians["wall_s"], goal=GOAL, quick=quick)


if __name__ == "__main__":
    main()
